"""Encoder outputs that come from elsewhere, and encoder-decoder models."""

from __future__ import annotations

from typing import Any

import pytest

from jubako.config import CacheConfig, JubakoConfig, ModelConfig, SchedulerConfig
from jubako.errors import ConfigError
from jubako.kv_cache import CrossAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from jubako.sampling_params import SamplingParams
from jubako.scheduler import (
    ECConnectorOutput,
    EncoderCacheManager,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from jubako.scheduler.encoder_decoder_cache import EncoderDecoderCacheManager
from jubako.scheduler.encoder_scheduling import plan_encoder_chunk
from jubako.scheduler.limits import check_hooks
from tests.scheduler.fake_connector import finish_step, run_step
from tests.scheduler.harness import (
    finish,
    full_spec,
    make_request,
    make_scheduler,
    result_for,
    scheduled,
)

WAITS = RequestStatus.WAITING_FOR_REMOTE_EC


class ScriptedEncoders:
    """An encoder-cache connector that has `items`, those in `slow` only after a while."""

    def __init__(self, *items: str, slow: str = "") -> None:
        self.items = set(items)
        self.slow = set(slow)
        self.keeps: set[str] = set()
        self.broken: set[str] = set()
        self.loads: list[str] = []

    def _called(self, name: str) -> None:
        if name in self.broken:
            raise RuntimeError("broken")

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self.items

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return not any(f.identifier in self.slow for f in request.mm_features)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.loads.append(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        self._called("meta")
        return list(self.loads)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        self._called("output")

    def request_finished(self, request: Request) -> tuple[bool, None]:
        self._called("finished")
        return request.request_id in self.keeps, None

    def shutdown(self) -> None:
        self._called("shutdown")


def make(connector: ScriptedEncoders, **options: Any) -> Scheduler:
    return make_scheduler(
        hooks={"ec_connector": connector},
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        **options,
    )


def with_image(request_id: str, *names: str) -> Request:
    first = 100 * sum(map(ord, request_id))
    return Request(
        request_id,
        list(range(first, first + 12)),
        SamplingParams(max_tokens=3, ignore_eos=True),
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(2 + 5 * i, 4))
            for i, name in enumerate(names)
        ],
    )


def report(scheduler: Scheduler, step: SchedulerOutput, **ids: set[str]) -> dict[str, Any]:
    done = {i: [3] for i in step.num_scheduled_tokens}
    result = result_for(step, **done)
    result.ec_connector_output = ECConnectorOutput(**ids)
    messages = scheduler.update_from_output(step, result)
    return {o.request_id: o for message in messages.values() for o in message.outputs}


# -- loads outside steps ------------------------------------------------------------------------


def test_a_request_waits_for_its_encoder_output_and_others_pass():
    connector = ScriptedEncoders("A", slow="A")
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    scheduler.add_request(make_request("b", 5, 9, ignore_eos=True))
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 5}
    assert scheduler.requests["a"].status is WAITS
    assert step.ec_connector_metadata == ["A"]
    # Its room is taken from the beginning.
    assert scheduler.encoder_cache_manager.num_free_slots == 12
    assert scheduler.has_transfers()
    report(scheduler, step)
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 1}
    connector.slow = set()
    report(scheduler, step, finished_recving={"A"})
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 1, "a": 12}
    assert step.scheduled_encoder_inputs == {}
    assert connector.loads == ["A"]


def test_an_output_that_another_waits_for_is_waited_for_too():
    connector = ScriptedEncoders("A", slow="A")
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    scheduler.schedule()
    connector.slow = set()
    scheduler.add_request(with_image("b", "A"))
    step = scheduler.schedule()
    assert scheduled(step) == {}
    assert scheduler.requests["b"].status is WAITS
    report(scheduler, step, finished_recving={"A"})
    assert scheduled(scheduler.schedule()) == {"a": 12, "b": 12}


def test_an_output_that_fails_to_come_is_computed():
    connector = ScriptedEncoders("A", slow="A")
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    step = scheduler.schedule()
    report(scheduler, step, failed_recving={"A"})
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 12}
    assert step.scheduled_encoder_inputs == {"a": [0]}
    assert scheduler.encoder_cache_manager.num_free_slots == 12


def test_an_overdue_output_is_computed():
    connector = ScriptedEncoders("A", slow="A")
    scheduler = make(connector)
    scheduler.encoder_transfers._timeout = 1e-9
    scheduler.add_request(with_image("a", "A"))
    assert scheduled(scheduler.schedule()) == {}
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == {"a": [0]}
    # What comes too late is nobody's.
    report(scheduler, step, finished_recving={"A"})
    assert not scheduler.encoder_transfers.is_busy


def test_the_room_of_a_load_stays_taken_when_its_request_ends():
    connector = ScriptedEncoders("A", slow="A")
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    step = scheduler.schedule()
    finish(scheduler, "a")
    cache = scheduler.encoder_cache_manager
    assert cache.num_freeable_slots == 12
    report(scheduler, step, finished_recving={"A"})
    assert cache.num_freeable_slots == 16
    assert "A" in cache.cached


def test_new_weights_make_what_is_under_way_worthless():
    connector = ScriptedEncoders("A", slow="A")
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    scheduler.schedule()
    scheduler.reset_encoder_cache()
    assert not scheduler.encoder_transfers.is_busy
    connector.slow = set()
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 12}
    assert connector.loads == ["A", "A"]


# -- loads inside steps -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reported", "never told"])
def test_a_step_that_ran_on_a_missing_output_is_void(how: str):
    connector = ScriptedEncoders("A")
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    scheduler.add_request(with_image("b", "B"))
    connector.broken = {"meta"} if how == "never told" else set()
    step = scheduler.schedule()
    connector.broken = set()
    assert step.scheduled_encoder_inputs == {"b": [0]}
    outputs = report(scheduler, step, failed_recving={"A"} if how == "reported" else set())
    assert list(outputs) == ["b"]
    assert scheduler.requests["a"].status is RequestStatus.PREEMPTED
    probe = with_image("a", "A")
    assert scheduler.block_hasher is not None
    probe.attach_block_hasher(scheduler.block_hasher, 4)
    assert scheduler.kv_cache_manager.get_computed_blocks(probe)[1] == 0
    step = scheduler.schedule()
    assert step.preempted_req_ids == {"a"}
    report(scheduler, step)
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == {"a": [0]}
    assert scheduled(step) == {"b": 1, "a": 12}


def test_outputs_are_kept_until_they_are_sent():
    connector = ScriptedEncoders()
    connector.keeps = {"a"}
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    run_step(scheduler)
    request = scheduler.requests["a"]
    cache = scheduler.encoder_cache_manager
    # It is past its image, and holds it no longer; another is not.
    scheduler.add_request(with_image("b", "B"))
    finish(scheduler, "a")
    assert cache.num_freeable_slots == 16
    cache.allocate(request, 0)
    cache.keep_for_sending(request)
    cache.free(request)
    assert cache.num_freeable_slots == 12
    assert scheduler.encoder_transfers.is_busy
    step = scheduler.schedule()
    report(scheduler, step, finished_sending={"A", "unknown"})
    assert not scheduler.encoder_transfers.is_busy
    assert cache.num_sending == 0


def test_outputs_that_are_never_reported_as_sent_may_go_in_the_end(caplog):
    connector = ScriptedEncoders()
    connector.keeps = {"a"}
    scheduler = make(connector)
    scheduler.encoder_transfers._send_timeout = 1e-9
    scheduler.add_request(with_image("a", "A"))
    # It has not passed its image when it ends.
    step = scheduler.schedule()
    request = scheduler.requests["a"]
    scheduler.encoder_cache_manager.allocate(request, 0)
    finish(scheduler, "a")
    assert scheduler.has_requests()
    assert scheduler.encoder_cache_manager.num_sending == 1
    report(scheduler, step)
    scheduler.pause()
    run_step(scheduler)
    assert "was not reported as sent" in caplog.text
    assert scheduler.encoder_cache_manager.num_sending == 0
    assert scheduler.encoder_cache_manager.num_freeable_slots == 16
    assert not scheduler.has_requests()


def test_an_output_is_kept_as_long_as_the_last_request_that_sends_it_may_take():
    connector = ScriptedEncoders()
    connector.keeps = {"a", "b"}
    scheduler = make(connector)
    for request_id in ("a", "b"):
        scheduler.add_request(with_image(request_id, "A"))
    step = scheduler.schedule()
    for request_id, seconds in (("a", 1e-9), ("b", 1e9)):
        scheduler.encoder_cache_manager.allocate(scheduler.requests[request_id], 0)
        scheduler.encoder_transfers._send_timeout = seconds
        finish(scheduler, request_id)
    report(scheduler, step)
    run_step(scheduler)
    assert scheduler.encoder_cache_manager.num_sending == 1
    step = scheduler.schedule()
    report(scheduler, step, finished_sending={"A"})
    assert scheduler.encoder_cache_manager.num_sending == 0


def test_a_connector_that_breaks_everywhere_disturbs_nobody():
    connector = ScriptedEncoders()
    connector.broken = {"meta", "output", "finished", "shutdown"}
    scheduler = make(connector)
    scheduler.add_request(with_image("a", "A"))
    while scheduler.has_requests():
        step = scheduler.schedule()
        report(scheduler, step, finished_recving=set())
    scheduler.shutdown()
    assert scheduler.kv_cache_manager.usage == 0


# -- encoder-decoder models ---------------------------------------------------------------------


def clip(request_id: str, size: int, *, prompt: int = 4) -> Request:
    """A request that reads a sound of `size` embeddings."""
    return Request(
        request_id,
        list(range(prompt)),
        SamplingParams(max_tokens=4, ignore_eos=True),
        mm_features=[
            MultiModalFeatureSpec(None, "audio", f"clip-{request_id}", PlaceholderRange(0, size))
        ],
    )


def test_outputs_live_for_one_step_and_are_never_shared():
    cache = EncoderDecoderCacheManager(3000)
    assert isinstance(cache, EncoderCacheManager)
    first, second = clip("a", 1500), clip("b", 1500)
    assert not cache.check_and_update_cache(first, 0)
    assert cache.can_allocate(first, 0, 1500, 0)
    assert not cache.can_allocate(first, 0, 1499, 0)
    cache.allocate(first, 0)
    assert cache.can_allocate(second, 0, 1500, 0)
    assert not cache.can_allocate(second, 0, 1500, 1)
    cache.allocate(second, 0)
    assert cache.num_free_slots == 0
    assert cache.usage == 1.0
    assert not cache.check_and_update_cache(second, 0)
    assert cache.get_cached_input_ids(second) == {0}
    assert cache.get_freed_mm_hashes() == []
    assert cache.get_freed_mm_hashes() == ["clip-a", "clip-b"]
    assert cache.get_freed_mm_hashes() == []
    for _ in range(4):
        cache.free_encoder_input(first, 0)
        cache.free(first)
    assert cache.num_free_slots == 1500
    cache.reset()
    assert cache.num_free_slots == cache.num_freeable_slots == 3000


def test_a_clip_that_will_not_run_is_not_freed_twice():
    cache = EncoderDecoderCacheManager(100)
    request = clip("a", 60)
    cache.allocate(request, 0)
    assert cache.rollback(request, [0, 0]) == []
    assert cache.num_free_slots == 100
    assert cache.get_freed_mm_hashes() == cache.get_freed_mm_hashes() == []


def encoder_decoder(num_blocks: int = 40, **options: Any) -> Scheduler:
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32")
    values: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_num_encoder_input_tokens": 20,
        "encoder_cache_size": 40,
        "fair_prefill": False,
    }
    return Scheduler(
        JubakoConfig(
            model_config=ModelConfig(max_model_len=32),
            cache_config=CacheConfig(block_size=4),
            scheduler_config=SchedulerConfig(**(values | options)),
        ),
        KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_groups=[
                KVCacheGroupSpec(["decoder"], full_spec(4)),
                KVCacheGroupSpec(["cross"], cross),
            ],
        ),
    )


def test_the_encoder_runs_before_the_first_token_only():
    scheduler = encoder_decoder(long_prefill_token_threshold=3)
    scheduler.add_request(clip("a", 10))
    # Somebody else, since the threshold does not bind a request that is alone.
    scheduler.add_request(clip("b", 10))
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 3, "b": 3}
    assert step.scheduled_encoder_inputs == {"a": [0], "b": [0]}
    tables = scheduler.kv_cache_manager.get_block_ids("a")
    assert [len(table) for table in tables] == [1, 3]
    finish_step(scheduler, step)
    assert scheduler.encoder_cache_manager.num_free_slots == 40
    freed = []
    for _ in range(5):
        step = run_step(scheduler)
        assert step.scheduled_encoder_inputs == {}
        freed += step.free_encoder_mm_hashes
    assert sorted(freed) == ["clip-a", "clip-b"]
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache_manager.usage == 0


def test_after_the_first_token_no_item_is_looked_at():
    cache = EncoderDecoderCacheManager(10)
    request = clip("a", 8)
    for computed, inputs in ((0, [0]), (1, [])):
        chunk = plan_encoder_chunk(request, computed, 3, 10, cache, is_encoder_decoder=True)
        assert (chunk.num_new_tokens, chunk.inputs) == (3, inputs)
    chunk = plan_encoder_chunk(request, 0, 3, 7, cache, is_encoder_decoder=True)
    assert (chunk.num_new_tokens, chunk.inputs, chunk.is_cut) == (0, [], True)


def test_a_clip_beyond_the_encoders_budget_waits_for_the_next_step():
    scheduler = encoder_decoder()
    for request_id in ("a", "b"):
        scheduler.add_request(clip(request_id, 12))
    assert scheduled(run_step(scheduler)) == {"a": 4}
    step = run_step(scheduler)
    assert scheduled(step) == {"a": 1, "b": 4}
    assert step.scheduled_encoder_inputs == {"b": [0]}


def test_a_preempted_clip_is_encoded_again():
    scheduler = encoder_decoder(num_blocks=12)
    for request_id in ("a", "b"):
        scheduler.add_request(clip(request_id, 8, prompt=11))
    run_step(scheduler)
    while scheduler.requests["b"].status is not RequestStatus.PREEMPTED:
        run_step(scheduler)
    finish(scheduler, "a")
    step = scheduler.schedule()
    assert step.scheduled_cached_reqs.resumed_req_ids == {"b"}
    assert step.scheduled_encoder_inputs == {"b": [0]}
    assert [len(table) for table in scheduler.kv_cache_manager.get_block_ids("b")][1] == 2


def test_encoder_decoder_models_share_no_outputs():
    with pytest.raises(ConfigError, match="ec_connector"):
        check_hooks(None, ScriptedEncoders(), is_encoder_decoder=True)
