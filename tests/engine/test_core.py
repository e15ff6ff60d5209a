"""The engine core, with an executor that needs no model."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.checkpoint.info import Checkpoint
from jubako.engine.core import EngineCore
from jubako.engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from jubako.engine.setup import complete_config
from jubako.errors import ConfigError
from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler import LoRARequest
from tests.engine.conftest import MakeConfig
from tests.engine.fakes import EOS, FAIL, MAX_MODEL_LEN, VOCAB_SIZE, FakeExecutor, continuation

MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core(make_config: MakeConfig, checkpoint: Checkpoint) -> Iterator[MakeCore]:
    cores: list[EngineCore] = []

    def make(**options: Any) -> EngineCore:
        config = complete_config(make_config(**options), checkpoint, usage="llm")
        cores.append(EngineCore(config, checkpoint))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def request(request_id: str, prompt: Sequence[int], **options: Any) -> EngineCoreRequest:
    client_index = options.pop("client_index", 0)
    options.setdefault("max_tokens", 5)
    params = SamplingParams(temperature=0, **options)
    return EngineCoreRequest(
        request_id, list(prompt), None, params, None, EOS, 0.0, client_index=client_index
    )


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    """Step until nothing is left; outputs by request."""
    found: dict[str, list[EngineCoreOutput]] = {}
    while core.has_work():
        outputs, model_ran = core.step_fn()
        core.post_step(model_ran)
        for message in (outputs or {}).values():
            for output in message.outputs:
                found.setdefault(output.request_id, []).append(output)
    return found


def tokens(outputs: Sequence[EngineCoreOutput]) -> list[int]:
    return [t for o in outputs for t in o.new_token_ids]


def test_requests_are_continued(make_core: MakeCore) -> None:
    core = make_core()
    prompts = {"a": [5, 6, 7], "b": list(range(3, 43)), "c": [9]}
    for name, prompt in prompts.items():
        core.add_request(request(name, prompt))
    found = run(core)
    for name, prompt in prompts.items():
        assert tokens(found[name]) == continuation(prompt, 5)
        assert [o.finish_reason for o in found[name]] == [None] * 4 + [FinishReason.LENGTH]
    assert not core.has_unfinished_requests()


def test_the_last_step_tells_the_workers_whom_to_forget(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("a", [5], max_tokens=1))
    outputs, model_ran = core.step()
    assert model_ran
    assert outputs[0].outputs[0].finished
    assert core.has_work()
    assert core.executor.tokens.keys() == {"a"}  # type: ignore[attr-defined]
    _, model_ran = core.step()
    assert not model_ran
    assert not core.has_work()
    assert core.executor.tokens == {}  # type: ignore[attr-defined]
    assert core.step() == ({}, False)


def test_outputs_go_to_the_front_end_that_asked(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("a", [5], client_index=0))
    core.add_request(request("b", [6], client_index=3))
    outputs, _ = core.step()
    assert {k: [o.request_id for o in v.outputs] for k, v in outputs.items()} == {
        0: ["a"],
        3: ["b"],
    }


# -- one request's fault ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([VOCAB_SIZE], str(VOCAB_SIZE - 1)),
        ([-1], "0 to"),
        ([5] * MAX_MODEL_LEN, str(MAX_MODEL_LEN - 1)),
    ],
)
def test_a_request_that_would_stop_the_step_is_answered_alone(
    make_core: MakeCore, prompt: list[int], message: str
) -> None:
    core = make_core()
    core.add_request(request("good", [5, 6]))
    core.add_request(request("bad", prompt, client_index=1))
    outputs, _ = core.step()
    (bad,) = outputs[1].outputs
    assert bad.finish_reason is FinishReason.ERROR
    assert message in (bad.error or "")
    rest = run(core)
    assert rest.keys() == {"good"}
    assert tokens(outputs[0].outputs + rest["good"]) == continuation([5, 6], 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_embeds", b""),
        ("lora_request", LoRARequest("l", 1)),
    ],
)
def test_what_no_worker_can_run_is_answered_alone(
    make_core: MakeCore, name: str, value: object
) -> None:
    core = make_core()
    odd = request("odd", [5, 6])
    setattr(odd, name, value)
    core.add_request(odd)
    core.add_request(request("a", [5, 6]))
    outputs = run(core)
    assert outputs["odd"][0].error == f"{name} is not built; leave it out."
    assert tokens(outputs["a"]) == continuation([5, 6], 5)


def test_a_request_to_pool_is_refused_by_a_model_that_writes(make_core: MakeCore) -> None:
    core = make_core()
    odd = request("odd", [5, 6])
    odd.sampling_params, odd.pooling_params = None, PoolingParams()
    core.add_request(odd)
    core.add_request(request("a", [5, 6]))
    outputs = run(core)
    assert "writes text" in (outputs["odd"][0].error or "")
    assert tokens(outputs["a"]) == continuation([5, 6], 5)


def test_a_refusal_is_answered_without_any_other_request(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("bad", []))
    assert core.has_work()
    assert run(core)["bad"][0].finish_reason is FinishReason.ERROR


def test_a_duplicate_id_is_an_error_of_the_second_request(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("a", [5, 6]))
    core.add_request(request("a", [7], client_index=1))
    outputs, _ = core.step()
    (second,) = outputs[1].outputs
    assert second.finish_reason is FinishReason.ERROR
    assert tokens(outputs[0].outputs + run(core)["a"]) == continuation([5, 6], 5)


def test_an_unexpected_error_does_not_tell_its_text(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()

    def fail(*_: Any) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(core.scheduler, "add_request", fail)
    core.add_request(request("a", [5]))
    (output,) = run(core)["a"]
    assert output.finish_reason is FinishReason.ERROR
    assert "secret" not in (output.error or "")


def test_an_error_of_the_step_is_raised(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("a", [FAIL]))
    with pytest.raises(RuntimeError):
        core.step()


# -- aborts -----------------------------------------------------------------------------------


def test_an_abort_frees_everything_and_says_nothing(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("a", range(3, 20)))
    core.step()
    assert core.scheduler.kv_cache_manager.usage > 0
    core.abort_requests(["a", "unknown"])
    core.abort_requests(["a"])
    assert run(core) == {}
    assert core.scheduler.kv_cache_manager.usage == 0
    assert core.reset_prefix_cache()


def test_an_abort_during_a_step_drops_the_tokens_of_that_step(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    core.add_request(request("a", [5]))
    core.add_request(request("b", [6]))
    sample = core.executor.sample_tokens

    def abort_while_sampling(*args: Any) -> Any:
        core.abort_soon(["a"])
        return sample(*args)

    monkeypatch.setattr(core.executor, "sample_tokens", abort_while_sampling)
    outputs, _ = core.step()
    assert [o.request_id for o in outputs[0].outputs] == ["b"]


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7), st.integers(1, 40), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("abort soon"), st.integers(0, 7)),
        st.tuples(st.just("step")),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(events, st.booleans())
def test_no_order_of_events_leaves_a_request_behind(
    make_config: MakeConfig, checkpoint: Checkpoint, events: list[tuple[Any, ...]], overlap: bool
) -> None:
    """With a pool of 40 blocks and a budget of 16 tokens: chunks, preemptions and waiting."""
    options = {
        "num_gpu_blocks_override": 40,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "async_scheduling": overlap,
    }
    config = complete_config(make_config(**options), checkpoint, usage="llm")
    core = EngineCore(config, checkpoint)
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    outputs: dict[str, list[EngineCoreOutput]] = {}

    def step() -> None:
        for message in (core.step_fn()[0] or {}).values():
            for output in message.outputs:
                assert output.request_id not in aborted
                outputs.setdefault(output.request_id, []).append(output)

    for number, event in enumerate(events):
        if event[0] == "add":
            name = f"{number}"
            prompts[name] = ([3 + event[1]] * event[2], event[3])
            core.add_request(request(name, prompts[name][0], max_tokens=event[3]))
        elif event[0] == "step":
            step()
        elif prompts:
            name = list(prompts)[event[1] % len(prompts)]
            if event[0] == "abort":
                core.abort_requests([name])
                aborted.add(name)
            else:
                core.abort_soon([name])
                if core.has_unfinished_requests():
                    step_outputs = len(outputs.get(name, ()))
                    step()
                    assert len(outputs.get(name, ())) == step_outputs
                    aborted.add(name)
    for _ in range(2000):
        if not core.has_work():
            break
        step()
    assert not core.has_work()
    assert core.scheduler.kv_cache_manager.usage == 0
    for name, (prompt, count) in prompts.items():
        done = outputs.get(name, [])
        if name not in aborted:
            assert tokens(done) == continuation(prompt, count)
        assert tokens(done) == continuation(prompt, len(tokens(done)))
        assert sum(o.finished for o in done[:-1]) == 0
    core.shutdown()


# -- start and end ----------------------------------------------------------------------------


def test_ready_says_what_was_decided(make_core: MakeCore) -> None:
    ready = make_core(num_gpu_blocks_override=50, max_num_seqs=3).ready
    assert ready.num_gpu_blocks == 50
    assert ready.block_sizes == [4]
    assert ready.max_model_len == MAX_MODEL_LEN
    assert ready.vocab_size == VOCAB_SIZE
    assert ready.max_num_seqs == 3
    assert ready.dtype == "float32"
    assert ready.device == "cpu"
    assert ready.enable_prefix_caching


def test_a_context_that_nobody_asked_for_is_shortened_to_the_memory(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_of_a_block = 4 * 8 * 2 * 4
    monkeypatch.setattr(
        FakeExecutor, "determine_available_memory", lambda self: [11 * bytes_of_a_block]
    )
    core = make_core()
    assert core.ready.max_model_len == core.config.model_config.max_model_len == 40
    core.add_request(request("a", [5] * 39, max_tokens=None))
    assert tokens(run(core)["a"]) == continuation([5] * 39, 1)
    with pytest.raises(ConfigError, match="max_model_len"):
        make_core(max_model_len=100)


def test_the_option_that_makes_the_pool_too_small_is_named(make_core: MakeCore) -> None:
    with pytest.raises(ConfigError, match=r"raise num_gpu_blocks_override=2\.$"):
        make_core(num_gpu_blocks_override=2)


def test_a_pool_too_small_for_one_sequence_is_refused(make_core: MakeCore) -> None:
    with pytest.raises(ConfigError, match="At most 36 tokens"):
        make_core(num_gpu_blocks_override=10)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OverflowError("Python int too large to convert to C ssize_t"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=repr,
)
def test_too_little_memory_is_said_with_the_options_that_need_it(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def allocate(self: FakeExecutor, kv_cache_configs: Any) -> None:
        raise error

    monkeypatch.setattr(FakeExecutor, "_initialize_kv", allocate)
    with pytest.raises(ConfigError, match="memory") as caught:
        make_core(num_gpu_blocks_override=50, max_num_seqs=3)
    assert "num_gpu_blocks_override=50" in str(caught.value)
    assert "max_num_seqs=3" in str(caught.value)


def test_a_failing_start_frees_the_workers(make_config: MakeConfig, checkpoint: Checkpoint) -> None:
    made: list[FakeExecutor] = []

    def make_executor(*args: Any) -> FakeExecutor:
        made.append(FakeExecutor(*args))
        return made[-1]

    config = complete_config(make_config(num_gpu_blocks_override=1), checkpoint, usage="llm")
    with pytest.raises(ConfigError):
        EngineCore(config, checkpoint, make_executor)
    assert made[0].was_shut_down


def test_the_heap_of_start_up_is_not_scanned_again(make_core: MakeCore) -> None:
    core = make_core()
    assert gc.get_freeze_count() > 0
    core.shutdown()
    assert gc.get_freeze_count() == 0


def test_prefix_hits_are_reported(make_core: MakeCore) -> None:
    core = make_core()
    prompt = list(range(3, 20))
    core.add_request(request("a", prompt))
    assert run(core)["a"][0].num_cached_tokens == 0
    core.add_request(request("b", prompt))
    assert run(core)["b"][0].num_cached_tokens == 16
    assert core.reset_prefix_cache()
    core.add_request(request("c", prompt))
    assert run(core)["c"][0].num_cached_tokens == 0
