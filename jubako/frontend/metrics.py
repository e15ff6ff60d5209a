"""How do an engine's statistics look to Prometheus?

Statistics come once a step and are added up in plain numbers and arrays; Prometheus' objects are
made when somebody looks. Names are vLLM's with the prefix `jubako:`, so that its dashboards need
one replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jubako.config import JubakoConfig
from jubako.engine.messages import EngineCoreReady

if TYPE_CHECKING:
    from jubako.frontend.stats import FinishedRequestStats, IterationStats
    from jubako.scheduler.engine_output import SchedulerStats

PREFIX = "jubako:"

_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ANSWERS = (1, 2, 5, 10, 20)

FINISH_REASONS = ("stop", "length", "abort", "error")


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    return tuple(
        step * 10**power
        for power in range(len(str(most)))
        for step in (1, 2, 5)
        if step * 10**power <= most
    )


class BulkHistogram:
    """Counts values by bucket, many at a time."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = np.asarray(bounds, dtype=np.float64)
        self._labels = [*(f"{float(b)!r}" for b in bounds), "+Inf"]
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Add every one of `values`."""
        array = np.fromiter(values, dtype=np.float64)
        if array.size:
            # A value that equals a bound belongs to that bound's bucket.
            places = np.searchsorted(self._bounds, array, side="left")
            self._counts += np.bincount(places, minlength=self._counts.size)
            self._sum += float(array.sum())

    def family(self, names: Sequence[str], labels: Sequence[str]) -> Metric:
        """The histogram as Prometheus has it: cumulative counts."""
        family = HistogramMetricFamily(self._name, self._help, labels=names)
        cumulative = np.cumsum(self._counts).tolist()
        family.add_metric(labels, list(zip(self._labels, map(float, cumulative))), self._sum)
        return family


class PrometheusStatLogger(Collector):
    """Adds up the statistics of one engine, and shows them in `registry` on request."""

    def __init__(
        self,
        config: JubakoConfig,
        ready: EngineCoreReady,
        model_name: str,
        registry: CollectorRegistry,
        engine_index: int = 0,
    ) -> None:
        self._label_names = ["model_name", "engine"]
        self._labels = [model_name, str(engine_index)]
        self._cache_config = _cache_config_labels(config, ready)
        self._gauges = {
            "num_requests_running": 0.0,
            "num_requests_waiting": 0.0,
            "kv_cache_usage_perc": 0.0,
        }
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._by_source = dict.fromkeys(_SOURCES, 0)
        self._success = dict.fromkeys(FINISH_REASONS, 0)
        self._histograms = _histograms(ready.max_model_len)
        registry.register(self)

    # -- every step ---------------------------------------------------------------------------

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Add the statistics of one step."""
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._gauges["num_requests_running"] = stats.num_running_reqs
        self._gauges["num_requests_waiting"] = stats.num_waiting_reqs
        self._gauges["kv_cache_usage_perc"] = stats.kv_cache_usage
        counters, histograms = self._counters, self._histograms
        for prefix, cache in (
            ("", stats.prefix_cache_stats),
            ("external_", stats.connector_prefix_cache_stats),
        ):
            if cache is not None:
                counters[prefix + "prefix_cache_queries"] += cache.queries
                counters[prefix + "prefix_cache_hits"] += cache.hits
        counters["num_preemptions"] += stats.num_preemptions
        if stats.num_scheduled_tokens:
            histograms["iteration_tokens_total"].observe([stats.num_scheduled_tokens])
        if evicted := stats.kv_cache_eviction_events:
            histograms["kv_block_lifetime_seconds"].observe(e.lifetime_seconds for e in evicted)
            histograms["kv_block_idle_before_evict_seconds"].observe(
                e.idle_seconds for e in evicted
            )
            histograms["kv_block_reuse_gap_seconds"].observe(
                gap for e in evicted for gap in e.reuse_gaps_seconds
            )

    def _record_iteration(self, stats: IterationStats) -> None:
        counters, histograms = self._counters, self._histograms
        counters["prompt_tokens"] += stats.num_prompt_tokens
        counters["prompt_tokens_cached"] += stats.num_cached_prompt_tokens
        counters["generation_tokens"] += stats.num_generation_tokens
        found, loaded = stats.num_cached_prompt_tokens, stats.num_external_prompt_tokens
        self._by_source["local_cache_hit"] += found
        self._by_source["external_kv_transfer"] += loaded
        self._by_source["local_compute"] += stats.num_prompt_tokens - found - loaded
        histograms["time_to_first_token_seconds"].observe(stats.time_to_first_tokens_iter)
        histograms["inter_token_latency_seconds"].observe(stats.inter_token_latencies_iter)
        if not stats.finished_requests:
            return
        histograms["request_max_num_generation_tokens"].observe(
            stats.max_num_generation_tokens_iter
        )
        histograms["request_params_n"].observe(stats.n_params_iter)
        finished = stats.finished_requests
        for request in finished:
            self._success[str(request.finish_reason)] += 1
        for name, value in _OF_FINISHED.items():
            histograms[name].observe(map(value, finished))
        histograms["request_time_per_output_token_seconds"].observe(
            r.mean_time_per_output_token for r in finished if r.num_generation_tokens > 1
        )
        histograms["request_params_max_tokens"].observe(
            r.max_tokens_param for r in finished if r.max_tokens_param is not None
        )

    # -- when somebody looks ------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Every metric with its present value."""
        names, labels = self._label_names, self._labels
        for name, gauge in self._gauges.items():
            family: Any = GaugeMetricFamily(PREFIX + name, _GAUGES[name], labels=names)
            family.add_metric(labels, gauge)
            yield family
        family = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "How the KV cache is set up.",
            labels=[*names, *self._cache_config],
        )
        family.add_metric([*labels, *self._cache_config.values()], 1)
        yield family
        for name, count in self._counters.items():
            family = CounterMetricFamily(PREFIX + name, _COUNTERS[name], labels=names)
            family.add_metric(labels, count)
            yield family
        yield self._split("prompt_tokens_by_source", "source", self._by_source)
        yield self._split("request_success", "finished_reason", self._success)
        for histogram in self._histograms.values():
            yield histogram.family(names, labels)

    def _split(self, name: str, label: str, counts: dict[str, int]) -> Metric:
        family = CounterMetricFamily(
            PREFIX + name, _SPLIT_COUNTERS[name], labels=[*self._label_names, label]
        )
        for value, count in counts.items():
            family.add_metric([*self._labels, value], count)
        return family


_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait to be scheduled.",
    "kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
}

_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Prompt tokens looked up in caches outside the engine.",
    "external_prefix_cache_hits": "Prompt tokens found in caches outside the engine.",
    "num_preemptions": "Requests put back from the running batch.",
    "prompt_tokens": "Prompt tokens of requests that produced a first token.",
    "prompt_tokens_cached": "Of these, tokens whose KV was found.",
    "prompt_tokens_recomputed": "Tokens found in a cache and computed nevertheless.",
    "generation_tokens": "Tokens generated.",
}

_SPLIT_COUNTERS = {
    "prompt_tokens_by_source": "Prompt tokens by where their KV came from.",
    "request_success": "Requests finished, by reason.",
}

_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


_OF_FINISHED: dict[str, Callable[[FinishedRequestStats], float]] = {
    "e2e_request_latency_seconds": lambda r: r.e2e_latency,
    "request_queue_time_seconds": lambda r: r.queued_time,
    "request_prefill_time_seconds": lambda r: r.prefill_time,
    "request_decode_time_seconds": lambda r: r.decode_time,
    "request_inference_time_seconds": lambda r: r.inference_time,
    "request_prompt_tokens": lambda r: r.num_prompt_tokens,
    "request_generation_tokens": lambda r: r.num_generation_tokens,
    "request_prefill_kv_computed_tokens": lambda r: r.num_prompt_tokens - r.num_cached_tokens,
}
"""Histogram → what it takes of a request that has ended."""


def _histograms(max_model_len: int) -> dict[str, BulkHistogram]:
    lengths = token_buckets(max_model_len)
    definitions: dict[str, tuple[str, Sequence[float]]] = {
        "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_TOKEN_SECONDS),
        "inter_token_latency_seconds": ("Between two outputs of a request.", _TOKEN_SECONDS),
        "request_time_per_output_token_seconds": (
            "Mean time between tokens of a finished request.",
            _TOKEN_SECONDS,
        ),
        "e2e_request_latency_seconds": ("From arrival to the last token.", _REQUEST_SECONDS),
        "request_queue_time_seconds": ("From arrival to being scheduled.", _REQUEST_SECONDS),
        "request_prefill_time_seconds": (
            "From being scheduled to the first token.",
            _REQUEST_SECONDS,
        ),
        "request_decode_time_seconds": ("From the first to the last token.", _REQUEST_SECONDS),
        "request_inference_time_seconds": (
            "From being scheduled to the last token.",
            _REQUEST_SECONDS,
        ),
        "request_prompt_tokens": ("Prompt tokens of a finished request.", lengths),
        "request_generation_tokens": ("Generated tokens of a finished request.", lengths),
        "request_max_num_generation_tokens": (
            "Most tokens generated for one answer of a finished request.",
            lengths,
        ),
        "request_params_n": ("The parameter n of a request.", _ANSWERS),
        "request_params_max_tokens": ("The parameter max_tokens of a request.", lengths),
        "request_prefill_kv_computed_tokens": (
            "Prompt tokens of a finished request that were computed, not found.",
            lengths,
        ),
        "iteration_tokens_total": ("Tokens computed in a step.", _ITERATION_TOKENS),
        "kv_block_lifetime_seconds": (
            "From a sampled block's use to its eviction.",
            _REQUEST_SECONDS,
        ),
        "kv_block_idle_before_evict_seconds": (
            "From a sampled block's last use to its eviction.",
            _REQUEST_SECONDS,
        ),
        "kv_block_reuse_gap_seconds": ("Between two uses of a sampled block.", _REQUEST_SECONDS),
    }
    return {
        name: BulkHistogram(PREFIX + name, help, bounds)
        for name, (help, bounds) in definitions.items()
    }


def _cache_config_labels(config: JubakoConfig, ready: EngineCoreReady) -> dict[str, str]:
    cache = config.cache_config
    return {
        "block_size": str(cache.block_size),
        "num_gpu_blocks": str(ready.num_gpu_blocks),
        "enable_prefix_caching": str(ready.enable_prefix_caching),
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        "kv_cache_tokens": str(ready.kv_cache_tokens),
    }
