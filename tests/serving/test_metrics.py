"""What Prometheus sees of an engine."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jubako.config import JubakoConfig
from jubako.frontend.metrics import PREFIX, BulkHistogram, PrometheusStatLogger, token_buckets
from jubako.frontend.stats import FinishedRequestStats, FinishReason, IterationStats
from jubako.kv_cache.metrics import KVCacheEvictionEvent, PrefixCacheStats
from jubako.scheduler.engine_output import SchedulerStats
from tests.serving.fake_engine import FakeAsyncLLM

NAMES = {
    "gauge": {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info",
    },
    "counter": {
        "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
        "external_prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_by_source",
        "prompt_tokens_cached", "prompt_tokens_recomputed", "generation_tokens", "request_success",
    },
    "histogram": {
        "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
        "request_params_max_tokens", "request_prefill_kv_computed_tokens",
        "iteration_tokens_total", "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds",
    },
}  # fmt: skip


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def logger(registry: CollectorRegistry) -> PrometheusStatLogger:
    ready = FakeAsyncLLM(max_model_len=1000).ready
    return PrometheusStatLogger(JubakoConfig(), ready, "the-model", registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    labels = {"model_name": "the-model", "engine": "0"} | labels
    number = registry.get_sample_value(PREFIX + name, labels)
    assert number is not None, name
    return number


def test_every_metric_is_there_from_the_start(
    registry: CollectorRegistry, logger: PrometheusStatLogger
) -> None:
    text = generate_latest(registry).decode()
    families = {f.name: f.type for f in text_string_to_metric_families(text)}
    for kind, names in NAMES.items():
        for name in names:
            assert families.pop(PREFIX + name) == kind
    assert families == {}
    assert 'jubako:generation_tokens_total{engine="0",model_name="the-model"} 0.0' in text


def test_gauges_show_the_last_step(
    registry: CollectorRegistry, logger: PrometheusStatLogger
) -> None:
    logger.record(SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5), None)
    logger.record(SchedulerStats(num_running_reqs=1, kv_cache_usage=0.25), None)
    assert value(registry, "num_requests_running") == 1
    assert value(registry, "num_requests_waiting") == 0
    assert value(registry, "kv_cache_usage_perc") == 0.25


def test_counters_add_up(registry: CollectorRegistry, logger: PrometheusStatLogger) -> None:
    for _ in range(2):
        logger.record(
            SchedulerStats(
                prefix_cache_stats=PrefixCacheStats(requests=1, queries=10, hits=4),
                num_preemptions=1,
                num_scheduled_tokens=20,
            ),
            IterationStats(
                num_generation_tokens=5,
                num_prompt_tokens=10,
                num_cached_prompt_tokens=4,
                num_external_prompt_tokens=1,
            ),
        )
    assert value(registry, "prefix_cache_queries_total") == 20
    assert value(registry, "prefix_cache_hits_total") == 8
    assert value(registry, "num_preemptions_total") == 2
    assert value(registry, "generation_tokens_total") == 10
    assert value(registry, "prompt_tokens_total") == 20
    sources = {
        source: value(registry, "prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sources == {"local_compute": 10, "local_cache_hit": 8, "external_kv_transfer": 2}
    assert sum(sources.values()) == value(registry, "prompt_tokens_total")
    assert value(registry, "iteration_tokens_total_sum") == 40


def test_finished_requests(registry: CollectorRegistry, logger: PrometheusStatLogger) -> None:
    finished = [
        FinishedRequestStats(
            finish_reason=FinishReason.LENGTH,
            e2e_latency=2.0,
            num_prompt_tokens=30,
            num_generation_tokens=10,
            max_tokens_param=10,
            num_cached_tokens=16,
            decode_time=0.9,
            mean_time_per_output_token=0.1,
        ),
        FinishedRequestStats(finish_reason=FinishReason.ABORT),
    ]
    logger.record(
        None,
        IterationStats(
            finished_requests=finished, n_params_iter=[2], max_num_generation_tokens_iter=[10]
        ),
    )
    reasons = {
        reason: value(registry, "request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    assert value(registry, "e2e_request_latency_seconds_count") == 2
    assert value(registry, "e2e_request_latency_seconds_sum") == 2.0
    assert value(registry, "request_prefill_kv_computed_tokens_sum") == 14
    assert value(registry, "request_params_max_tokens_count") == 1
    # An answer without a second token has no time between tokens.
    assert value(registry, "request_time_per_output_token_seconds_count") == 1


def test_sampled_blocks(registry: CollectorRegistry, logger: PrometheusStatLogger) -> None:
    event = KVCacheEvictionEvent(
        lifetime_seconds=3.0, idle_seconds=1.0, reuse_gaps_seconds=(0.5, 0.25)
    )
    logger.record(SchedulerStats(kv_cache_eviction_events=[event]), None)
    assert value(registry, "kv_block_lifetime_seconds_sum") == 3.0
    assert value(registry, "kv_block_reuse_gap_seconds_count") == 2


def test_a_bulk_histogram_equals_one_that_observes_one_by_one() -> None:
    from prometheus_client import Histogram

    bounds = (1.0, 2.0, 5.0)
    values = [0.5, 1.0, 1.5, 2.0, 5.0, 5.1, 100.0]
    registry = CollectorRegistry()
    oracle = Histogram("x", "help", buckets=bounds, registry=registry)
    bulk = BulkHistogram("x", "help", bounds)
    for number in values:
        oracle.observe(number)
    bulk.observe(values[:3])
    bulk.observe(iter(values[3:]))
    bulk.observe([])
    got = {(s.name, s.labels.get("le")): s.value for s in bulk.family([], []).samples}
    (family,) = registry.collect()
    wanted = {
        (s.name, s.labels.get("le")): s.value for s in family.samples if s.name != "x_created"
    }
    assert got == wanted


def test_buckets_of_lengths() -> None:
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(30) == (1, 2, 5, 10, 20)
    assert token_buckets(1) == (1,)
