"""What the scheduler tells workers and front ends, and how it is configured and asked."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import jubako.scheduler
from jubako.config import CacheConfig, JubakoConfig, SchedulerConfig
from jubako.errors import ConfigError
from jubako.kv_cache import KVCacheConfig, KVCacheGroupSpec
from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler import (
    EngineCoreEventType,
    FinishReason,
    KVConnectorOutput,
    LogprobsLists,
    LoRARequest,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
)
from tests.scheduler.harness import (
    Driver,
    answer,
    full_spec,
    ids,
    make_request,
    make_scheduler,
    result_for,
    scheduled,
)

# -- configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message", "parameter"),
    [
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
            "max_num_batched_tokens=100 is less than max_model_len=256",
            "max_num_batched_tokens",
        ),
        ({"num_blocks": 1}, "num_blocks=1 leaves no KV block", "num_gpu_blocks_override"),
        ({"max_num_seqs": 65}, "max_num_seqs=65 is more than", "max_num_seqs"),
        ({"scheduling_policy": "lottery"}, "'lottery' is none of", "scheduling_policy"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_value_and_limit(options, message, parameter):
    with pytest.raises(ConfigError, match=message) as caught:
        make_scheduler(**options)
    assert caught.value.parameter == parameter


def test_only_scheduler_and_cache_concerns_need_to_be_filled():
    scheduler = Scheduler(
        JubakoConfig(cache_config=CacheConfig(), scheduler_config=SchedulerConfig(max_num_seqs=4)),
        KVCacheConfig(num_blocks=9, kv_cache_groups=[KVCacheGroupSpec(["l"], full_spec(4))]),
    )
    assert scheduler.max_model_len == 32
    driver = Driver(scheduler)
    driver.add(make_request("a", 20, None, ignore_eos=True))
    driver.run()
    assert len(driver.outputs["a"]) == 12
    driver.check_answers()


def test_a_model_without_kv_can_be_scheduled():
    scheduler = Scheduler(JubakoConfig(), KVCacheConfig(num_blocks=1))
    driver = Driver(scheduler)
    driver.add(make_request("a", 9, 4, ignore_eos=True))
    driver.run()
    assert len(driver.outputs["a"]) == 4


def test_chunked_prefill_off_never_splits_a_prompt():
    driver = Driver(
        make_scheduler(max_model_len=32, max_num_batched_tokens=32, enable_chunked_prefill=False)
    )
    driver.add(*(make_request(i, 20, 3, ignore_eos=True) for i in "abc"))
    assert driver.run(3) == [{"a": 20}, {"a": 1, "b": 20}, {"a": 1, "b": 1, "c": 20}]
    driver.run()
    driver.check_answers()


def test_threshold_does_not_bind_a_request_that_is_alone():
    options = {"long_prefill_token_threshold": 8, "max_num_batched_tokens": 32}
    for fair, first in ((True, 20), (False, 8)):
        driver = Driver(make_scheduler(fair_prefill=fair, **options))
        driver.add(make_request("a", 20, 2))
        assert scheduled(driver.step()) == {"a": first}


def test_watermark_keeps_blocks_free_while_others_run():
    driver = Driver(make_scheduler(num_blocks=21, max_model_len=64, watermark=0.25))
    driver.add(make_request("a", 40, 9, ignore_eos=True))
    driver.step()
    driver.add(make_request("b", 24, 9, ignore_eos=True))
    # 10 blocks are free; b needs 6, and 5 are to stay free.
    assert scheduled(driver.step()) == {"a": 1}
    driver.abort("a")
    assert scheduled(driver.step()) == {"b": 24}


def test_a_prompt_is_admitted_only_if_all_of_it_fits():
    for reserve, admitted in ((True, False), (False, True)):
        driver = Driver(
            make_scheduler(
                num_blocks=11,
                max_model_len=40,
                max_num_batched_tokens=16,
                scheduler_reserve_full_isl=reserve,
            )
        )
        driver.add(make_request("a", 8, 9, ignore_eos=True))
        driver.step()
        driver.add(make_request("b", 36, 2, ignore_eos=True))
        assert ("b" in scheduled(driver.step())) == admitted
        driver.run()
        driver.check_answers()


# -- records ------------------------------------------------------------------------------------


def test_seeds_are_the_requests_own_or_drawn_in_order():
    def seeds(engine_seed: int) -> list[int | None]:
        scheduler = make_scheduler(seed=engine_seed)
        scheduler.add_request(make_request("a", 3))
        scheduler.add_request(make_request("b", 3, seed=42))
        scheduler.add_request(make_request("c", 3))
        return [data.seed for data in scheduler.schedule().scheduled_new_reqs]

    first = seeds(0)
    assert first[1] == 42
    assert len({*first}) == 3
    assert seeds(0) == first
    assert seeds(1)[0] != first[0]


def test_new_requests_are_told_in_full_and_running_ones_as_differences():
    driver = Driver(make_scheduler(block_size=4, max_num_batched_tokens=8, max_num_seqs=4))
    driver.add(make_request("a", 7, 9, ignore_eos=True))
    step = driver.step()
    (new,) = step.scheduled_new_reqs
    assert (new.block_ids, new.num_computed_tokens) == (([1, 2],), 0)
    assert step.scheduled_cached_reqs.req_ids == []
    step = driver.step()
    cached = step.scheduled_cached_reqs
    assert (cached.req_ids, cached.new_block_ids) == (["a"], [None])
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([7], [1])
    assert cached.all_token_ids == {}
    assert cached.resumed_req_ids == set()
    step = driver.step()
    assert step.scheduled_cached_reqs.new_block_ids == [([3],)]


def test_common_prefix_counts_blocks_that_all_holders_share():
    driver = Driver(make_scheduler(block_size=4))
    prefix = list(range(100, 108))
    driver.add(make_request("a", [*prefix, 1], 9, ignore_eos=True))
    assert driver.step().num_common_prefix_blocks == [0]
    driver.add(make_request("b", [*prefix, 2], 9, ignore_eos=True))
    assert driver.step().num_common_prefix_blocks == [2]


def test_registered_blocks_are_remembered_for_one_step():
    driver = Driver(make_scheduler(block_size=4))
    driver.add(make_request("a", 9, 2, ignore_eos=True))
    driver.run()
    driver.add(make_request("b", 5, 2, ignore_eos=True))
    driver.step()
    assert len(driver.scheduler.kv_cache_manager.take_registered_block_ids()) == 1


def test_cached_tokens_are_those_of_the_first_admission():
    driver = Driver(make_scheduler(block_size=4, num_blocks=13, max_model_len=40))
    driver.add(*(make_request(i, 15, 6, ignore_eos=True) for i in ("a", "b", "c")))
    resumed_at = 0
    while driver.scheduler.has_requests():
        cached = driver.step().scheduled_cached_reqs
        if "c" in cached.resumed_req_ids:
            resumed_at = cached.num_computed_tokens[cached.req_ids.index("c")]
    # It found its own blocks when it came back.
    assert resumed_at > 0
    assert driver.ended["c"].num_cached_tokens == 0


def test_a_prompt_that_is_scored_is_computed_whole():
    driver = Driver(make_scheduler(block_size=4))
    prompt = list(range(100, 109))
    driver.add(make_request("a", prompt, 1))
    driver.step()
    driver.add(make_request("b", prompt, 1, prompt_logprobs=1, skip_reading_prefix_cache=False))
    assert scheduled(driver.step()) == {"b": 9}


def test_pipeline_stages_are_told_the_tokens_they_cannot_know():
    scheduler = make_scheduler()
    scheduler.config = scheduler.config.replace(parallel_config={"pipeline_parallel_size": 2})
    scheduler.add_request(make_request("a", 5, 9, ignore_eos=True))
    step = scheduler.schedule()
    scheduler.update_from_output(step, result_for(step, a=[77]))
    assert scheduler.schedule().scheduled_cached_reqs.new_token_ids == [[77]]


# -- outputs ------------------------------------------------------------------------------------


def test_outputs_are_grouped_by_client_and_stats_go_to_one():
    scheduler = make_scheduler(log_stats=True, include_finished_set=True)
    scheduler.add_request(make_request("a", 5, 1, client_index=0))
    scheduler.add_request(make_request("b", 5, 2, client_index=3))
    step = scheduler.schedule()
    messages = scheduler.update_from_output(step, result_for(step, a=[3], b=[4]))
    assert sorted(messages) == [0, 3]
    assert [o.request_id for o in messages[0].outputs] == ["a"]
    assert messages[0].finished_requests == {"a"}
    assert messages[3].finished_requests is None
    (stats,) = [m.scheduler_stats for m in messages.values() if m.scheduler_stats is not None]
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 0)
    assert stats.num_scheduled_tokens == 10
    assert stats.prefix_cache_stats is not None
    assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries) == (2, 10)
    assert 0 < stats.kv_cache_usage < 1
    # An abort is told to balancers even when nothing else is to say.
    scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    step = scheduler.schedule()
    messages = scheduler.update_from_output(step, ModelRunnerOutput())
    assert messages[3].finished_requests == {"b"}
    assert messages[3].outputs == []


def test_without_stats_an_idle_step_says_nothing():
    scheduler = make_scheduler()
    assert scheduler.make_stats() is None
    step = scheduler.schedule()
    assert step.total_num_scheduled_tokens == 0
    assert step.preempted_req_ids is None
    assert scheduler.update_from_output(step, ModelRunnerOutput()) == {}


def test_events_tell_the_stations_of_a_request_once():
    driver = Driver(make_scheduler(num_blocks=13, max_model_len=40, log_stats=True))
    driver.add(*(make_request(i, 15, 6, ignore_eos=True) for i in "abc"))
    events: list[EngineCoreEventType] = []
    while driver.scheduler.has_requests():
        step = driver.schedule()
        for output in driver.update(step, driver.mirror.execute(step)):
            if output.request_id == "c":
                events += [event.type for event in output.events or ()]
    queued, ran, preempted = (
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
        EngineCoreEventType.PREEMPTED,
    )
    assert events == [queued, ran, preempted, ran]


def test_logprobs_are_cut_to_the_tokens_that_are_kept():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, 9, eos=50, logprobs=1))
    scheduler.add_request(make_request("b", 5, 9, eos=50))
    step = scheduler.schedule()
    scheduler.update_from_output(step, result_for(step, a=[3], b=[3]))
    scheduler.update_draft_token_ids(jubako.scheduler.DraftTokenIds(["a", "b"], [[7, 50, 8], [7]]))
    step = scheduler.schedule()
    result = result_for(step, a=[7, 50, 8, 9], b=[7, 2])
    rows = np.arange(6, dtype=np.int32)
    result.logprobs = LogprobsLists(
        np.stack([rows, rows], axis=1),
        np.zeros((6, 2), dtype=np.float32),
        rows + 1,
        cu_num_generated_tokens=[0, 4, 6],
    )
    a, b = scheduler.update_from_output(step, result)[0].outputs
    assert a.new_token_ids == [7, 50]
    assert a.new_logprobs is not None
    assert a.new_logprobs.sampled_token_ranks.tolist() == [1, 2]
    assert b.new_logprobs is None


def test_prompt_logprobs_come_with_the_step_that_ends_the_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=2)
    scheduler.add_request(make_request("a", 6, 9, prompt_logprobs=0))
    step = scheduler.schedule()
    assert scheduler.update_from_output(step, result_for(step)) == {}
    step = scheduler.schedule()
    result = result_for(step, a=[3])
    rows = np.zeros(5, dtype=np.int32)
    result.prompt_logprobs_dict = {
        "a": LogprobsLists(rows[:, None], rows[:, None].astype(np.float32), rows)
    }
    (output,) = scheduler.update_from_output(step, result)[0].outputs
    assert output.new_prompt_logprobs_tensors is not None
    assert len(output.new_prompt_logprobs_tensors.sampled_token_ranks) == 5


def test_pooling_ends_with_its_output_and_may_fill_the_context():
    scheduler = make_scheduler(max_model_len=16, max_num_batched_tokens=10)
    scheduler.add_request(Request("a", list(range(16)), pooling_params=PoolingParams(task="x")))
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 10}
    assert step.scheduled_new_reqs[0].seed is None
    result = result_for(step)
    result.pooler_output = [None]
    assert scheduler.update_from_output(step, result) == {}
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 6}
    result = result_for(step)
    result.pooler_output = [np.ones(3)]
    (output,) = scheduler.update_from_output(step, result)[0].outputs
    assert output.finish_reason is FinishReason.STOP
    assert output.pooling_output.tolist() == [1, 1, 1]
    assert not scheduler.requests


def test_an_embeddings_prompt_counts_as_zeros():
    embeds = np.ones((6, 4), dtype=np.float32)
    request = Request("a", None, SamplingParams(), prompt_embeds=embeds)
    assert request.all_token_ids == [0] * 6
    scheduler = make_scheduler()
    scheduler.add_request(request)
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.prompt_token_ids is None
    assert new.prompt_embeds is embeds


# -- ends ---------------------------------------------------------------------------------------


def test_finishing_is_idempotent_in_every_state():
    driver = Driver(make_scheduler(num_blocks=13, max_model_len=40))
    driver.add(*(make_request(i, 15, ignore_eos=True) for i in "abc"))
    driver.add(make_request("waiting", 15))
    driver.run(2)
    driver.step()
    statuses = {i: r.status for i, r in driver.scheduler.requests.items()}
    assert statuses["c"] is RequestStatus.PREEMPTED
    assert statuses["waiting"] is RequestStatus.WAITING
    driver.abort("c", "waiting", "a", "nobody")
    driver.abort("c", "waiting", "a", "nobody")
    step = driver.step()
    assert step.finished_req_ids == {"a", "c", "waiting"}
    assert scheduled(step) == {"b": 1}
    driver.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert driver.scheduler.get_request_counts() == (0, 0)
    assert driver.scheduler.get_num_unfinished_requests() == 0
    # One more step tells the workers.
    assert driver.scheduler.has_requests()
    assert driver.step().finished_req_ids == {"b"}
    assert not driver.scheduler.has_requests()


def test_an_id_can_be_used_again_once_the_workers_know_of_its_end():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, 1))
    step = scheduler.schedule()
    scheduler.update_from_output(step, result_for(step, a=[3]))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add_request(make_request("a", 5, 1))
    scheduler.schedule()
    scheduler.add_request(make_request("a", [1, 2, 3], 1))
    assert scheduled(scheduler.schedule()) == {"a": 3}


def test_statuses_are_ordered_and_have_reasons():
    finished = [status for status in RequestStatus if status > RequestStatus.PREEMPTED]
    assert all(status.is_finished for status in finished)
    assert not any(s.is_finished for s in RequestStatus if s not in finished)
    assert [str(status.finish_reason) for status in finished] == [
        "stop",
        "length",
        "abort",
        "length",
        "error",
    ]
    assert RequestStatus.RUNNING.finish_reason is None


def test_block_hashes_grow_with_the_tokens():
    calls: list[int] = []

    def hasher(request: Any) -> list[Any]:
        calls.append(request.num_tokens)
        known = len(request.block_hashes)
        return [b"h%d" % i for i in range(known, request.num_tokens // 4)]

    request = Request("a", list(range(10)), block_hasher=hasher)
    assert len(request.block_hashes) == 2
    request.set_hash_block_size(4)
    for _ in range(6):
        request.append_output_token_ids(1)
    assert len(request.block_hashes) == 4
    assert calls == [10, 12, 16]
    request.append_output_token_ids([1, 2, 3, 4])
    assert len(request.block_hashes) == 5


# -- what other rooms plug in -------------------------------------------------------------------


def test_adapters_beyond_the_limit_wait_and_others_pass():
    scheduler = make_scheduler()
    scheduler.max_loras = 1
    for request_id, adapter in (("a", 1), ("b", 2), ("c", 1), ("d", None)):
        request = make_request(request_id, 5, 1, ignore_eos=True)
        if adapter is not None:
            request.lora_request = LoRARequest(f"adapter{adapter}", adapter)
        scheduler.add_request(request)
    step = scheduler.schedule()
    assert list(scheduled(step)) == ["a", "c", "d"]
    assert ids(scheduler.waiting) == ["b"]
    scheduler.update_from_output(step, result_for(step, a=[3], c=[3], d=[3]))
    assert list(scheduled(scheduler.schedule())) == ["b"]


class Connector:
    """A KV connector that finds `external` tokens, asynchronously if `is_async`."""

    def __init__(self, external: int | None, is_async: bool, keeps: bool = False) -> None:
        self.external, self.is_async, self.keeps = external, is_async, keeps
        self.calls: list[tuple[Any, ...]] = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.external, self.is_async and self.external != 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append(("alloc", request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        return dict(scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output):
        self.calls.append(("output", connector_output.finished_recving))

    def request_finished(self, request, block_ids):
        self.calls.append(("finished", request.request_id, block_ids))
        return self.keeps, {"remote": 1}

    def reset_cache(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


def test_remote_kv_is_waited_for_without_budget_or_place():
    connector = Connector(8, is_async=True)
    scheduler = make_scheduler(max_num_seqs=1, hooks={"connector": connector})
    scheduler.add_request(make_request("a", 11, 2))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {}
    assert scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(scheduler.kv_cache_manager.get_block_ids("a")[0]) == 2
    assert connector.calls == [("alloc", "a", 8)]
    scheduler.update_from_output(step, ModelRunnerOutput())
    step = scheduler.schedule()
    loaded = KVConnectorOutput(finished_recving={"a"})
    scheduler.update_from_output(step, ModelRunnerOutput(kv_connector_output=loaded))
    step = scheduler.schedule()
    (new,) = step.scheduled_new_reqs
    assert (new.num_computed_tokens, scheduled(step)) == (8, {"a": 3})
    assert step.kv_connector_metadata == {"a": 3}
    (output,) = scheduler.update_from_output(step, result_for(step, a=[3]))[0].outputs
    assert output.num_cached_tokens == 8
    assert output.num_external_computed_tokens == 8


def test_a_lookup_without_answer_sets_aside_and_others_pass():
    connector = Connector(None, is_async=True)
    scheduler = make_scheduler(hooks={"connector": connector})
    scheduler.add_request(make_request("a", 11, 2))
    scheduler.add_request(make_request("b", 11, 2, prompt_logprobs=0))
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 11}
    scheduler.update_from_output(step, result_for(step, b=[3]))
    connector.external = 0
    assert scheduled(scheduler.schedule()) == {"b": 1, "a": 11}


def test_blocks_outlive_a_request_until_they_are_sent():
    connector = Connector(0, is_async=False, keeps=True)
    scheduler = make_scheduler(hooks={"connector": connector})
    scheduler.add_request(make_request("a", 11, 1))
    step = scheduler.schedule()
    (output,) = scheduler.update_from_output(step, result_for(step, a=[3]))[0].outputs
    assert output.kv_transfer_params == {"remote": 1}
    assert scheduler.kv_cache_manager.usage > 0
    assert scheduler.reset_prefix_cache() is False
    step = scheduler.schedule()
    assert step.finished_req_ids == {"a"}
    sent = KVConnectorOutput(finished_sending={"a", "unknown"})
    scheduler.update_from_output(step, ModelRunnerOutput(kv_connector_output=sent))
    assert scheduler.kv_cache_manager.usage == 0
    assert scheduler.reset_prefix_cache() is True
    assert scheduler.reset_prefix_cache(reset_connector=True) is False
    scheduler.shutdown()
    assert connector.calls[-1] == ("shutdown",)


def test_aborting_a_load_frees_its_blocks_when_the_transfer_has_ended():
    connector = Connector(8, is_async=True)
    scheduler = make_scheduler(hooks={"connector": connector})
    scheduler.add_request(make_request("a", 11, 2))
    step = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.usage > 0
    loaded = KVConnectorOutput(finished_recving={"a"})
    scheduler.update_from_output(step, ModelRunnerOutput(kv_connector_output=loaded))
    assert scheduler.kv_cache_manager.usage == 0


class Grammars:
    """Grammars that are ready after `delay` questions."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.accepted: list[int] = []

    def is_ready(self, request: Request) -> bool:
        self.delay -= 1
        return self.delay < 0

    def grammar_bitmask(self, requests, drafts):
        rows = sum(1 + len(drafts.get(request.request_id, ())) for request in requests)
        return np.full((rows, 1), -1, dtype=np.int32)

    def accept_tokens(self, request, token_ids):
        self.accepted += token_ids

    def validate_drafts(self, request, token_ids):
        return token_ids[:1]

    def release(self, request): ...


def test_requests_with_a_grammar_wait_for_it_and_are_masked():
    grammars = Grammars(delay=2)
    scheduler = make_scheduler(hooks={"structured_output_manager": grammars})
    params = SamplingParams(max_tokens=3)
    request = Request("a", [1, 2, 3], params)
    request.uses_grammar, request.status = True, RequestStatus.WAITING_FOR_FSM
    scheduler.add_request(request)
    scheduler.add_request(make_request("b", 3, 9, ignore_eos=True))
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 3}
    assert scheduler.get_grammar_bitmask(step) is None
    scheduler.update_from_output(step, result_for(step, b=[3]))
    assert ids(scheduler.waiting) == ["a"]
    step = scheduler.schedule()
    scheduler.update_from_output(step, result_for(step, b=[3]))
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 1, "a": 3}
    mask = scheduler.get_grammar_bitmask(step)
    assert mask is not None
    assert mask.structured_output_request_ids == ["a"]
    assert mask.grammar_bitmask.shape == (1, 1)
    scheduler.update_from_output(step, result_for(step, a=[5], b=[3]))
    assert grammars.accepted == [5]
    scheduler.update_draft_token_ids(jubako.scheduler.DraftTokenIds(["a"], [[8, 9]]))
    step = scheduler.schedule()
    assert step.scheduled_spec_decode_tokens == {"a": [8]}
    mask = scheduler.get_grammar_bitmask(step)
    assert mask is not None
    assert mask.grammar_bitmask.shape == (2, 1)


def test_structured_outputs_start_by_waiting_for_the_grammar():
    from jubako.sampling_params import StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    assert Request("a", [1], params).status is RequestStatus.WAITING_FOR_FSM


# -- as a library -------------------------------------------------------------------------------


def test_the_example_of_the_package_runs():
    import doctest

    assert doctest.testmod(jubako.scheduler).failed == 0
    assert doctest.testmod(sys.modules["jubako.scheduler.fair_share"]).failed == 0


def test_importing_the_scheduler_imports_no_torch():
    code = "import sys, jubako.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_request_answers_as_if_it_were_alone():
    driver = Driver(make_scheduler(max_num_batched_tokens=7, num_blocks=30, max_model_len=64))
    driver.add(*(make_request(f"r{i}", [5, 6, 7, 8, i], 20) for i in range(12)))
    driver.run()
    driver.check_answers()
    assert driver.outputs["r3"] == answer(driver.requests["r3"], 64).tokens
