"""Steps in flight: the queue of batches, pauses, connectors and drafts in the engine core."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from jubako.checkpoint.info import Checkpoint
from jubako.engine.core import EngineCore
from jubako.engine.messages import EngineCoreOutput, FinishReason
from jubako.engine.setup import complete_config
from jubako.sampling_params import SamplingParams, StructuredOutputsParams
from jubako.scheduler import AsyncScheduler, KVConnectorOutput, OverlappingScheduler, Request
from tests.engine.conftest import MakeConfig
from tests.engine.fakes import EOS, FAIL, FakeExecutor, continuation
from tests.engine.test_core import request, run, tokens

MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core(make_config: MakeConfig, checkpoint: Checkpoint) -> Iterator[MakeCore]:
    cores: list[EngineCore] = []

    def make(hooks: dict[str, Any] | None = None, **options: Any) -> EngineCore:
        options = {"async_scheduling": True, **options}
        config = complete_config(make_config(**options), checkpoint, usage="llm")
        cores.append(EngineCore(config, checkpoint, **(hooks or {})))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def executor(core: EngineCore) -> FakeExecutor:
    assert isinstance(core.executor, FakeExecutor)
    return core.executor


def collect(core: EngineCore, steps: int) -> list[EngineCoreOutput]:
    """Outputs of the next calls."""
    found = []
    for _ in range(steps):
        for message in (core.step_fn()[0] or {}).values():
            found += message.outputs
    return found


# -- the queue --------------------------------------------------------------------------------


def test_the_executor_says_how_steps_are_run(make_core: MakeCore, monkeypatch: Any) -> None:
    alone = make_core(async_scheduling=False)
    assert alone.batch_queue is None
    assert alone.step_fn == alone.step
    ahead = make_core()
    assert ahead.step_fn == ahead.step_with_batch_queue
    assert type(ahead.scheduler) is AsyncScheduler
    monkeypatch.setattr(FakeExecutor, "max_concurrent_batches", 3)
    staged = make_core(async_scheduling=False)
    assert staged.step_fn == staged.step_with_batch_queue
    assert type(staged.scheduler) is OverlappingScheduler
    staged.add_request(request("a", [5, 6]))
    assert tokens(run(staged)["a"]) == continuation([5, 6], 5)


def test_the_next_step_is_planned_while_one_is_computed(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    assert core.step_fn() == (None, False)
    core.add_request(request("a", [5, 6, 7]))
    executor(core).gate.clear()
    # It is given to the workers, and nobody waits for it.
    assert core.step_fn() == (None, True)
    assert core.batch_queue is not None
    (first,) = core.batch_queue
    execute = core.executor.execute_model

    def checked(*args: Any, **kwargs: Any) -> Any:
        assert not first.result.done()
        executor(core).gate.set()
        return execute(*args, **kwargs)

    monkeypatch.setattr(core.executor, "execute_model", checked)
    outputs, model_runs = core.step_fn()
    assert model_runs
    assert outputs is not None
    assert tokens(outputs[0].outputs) == continuation([5, 6, 7], 1)
    assert len(core.batch_queue) == 1
    assert core.has_work()
    monkeypatch.undo()
    assert tokens(run(core)["a"]) == continuation([5, 6, 7], 5)[1:]
    assert not core.batch_queue
    assert executor(core).tokens == {}


@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_those_of_one_step_after_the_other(make_core: MakeCore, seed: int) -> None:
    found = []
    for ahead in (False, True):
        rng = random.Random(seed)
        core = make_core(
            async_scheduling=ahead,
            num_gpu_blocks_override=40,
            max_num_batched_tokens=16,
            max_num_seqs=5,
        )
        for i in range(20):
            options = {"logprobs": rng.choice([None, 2]), "prompt_logprobs": rng.choice([None, 1])}
            prompt = [rng.randrange(3, 90) for _ in range(rng.randrange(1, 60))]
            stops = rng.sample(range(3, 259), 20)
            core.add_request(
                request(f"{i}", prompt, max_tokens=rng.randrange(1, 30), stop_token_ids=stops)
                if i % 2
                else request(f"{i}", prompt, **options)
            )
        outputs = run(core)
        assert core.reset_prefix_cache()
        found.append(
            {
                name: (
                    tokens(parts),
                    [p.new_logprobs.logprobs.tolist() for p in parts if p.new_logprobs],
                    [
                        p.new_prompt_logprobs_tensors.logprobs.tolist()
                        for p in parts
                        if p.new_prompt_logprobs_tensors
                    ],
                    [(p.finish_reason, p.stop_reason) for p in parts if p.finished],
                )
                for name, parts in outputs.items()
            }
        )
    assert found[0] == found[1]


def test_the_error_of_a_step_is_raised_when_it_is_collected(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("a", [5, FAIL]))
    executor(core).gate.clear()
    assert core.step_fn() == (None, True)
    executor(core).gate.set()
    with pytest.raises(RuntimeError, match="secret reason"):
        core.step_fn()


def test_a_refusal_is_told_although_no_step_came_back(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("good", [5]))
    core.add_request(request("bad", [], client_index=1))
    executor(core).gate.clear()
    outputs, _ = core.step_fn()
    executor(core).gate.set()
    assert outputs is not None
    assert [o.finish_reason for o in outputs[1].outputs] == [FinishReason.ERROR]
    assert tokens(run(core)["good"]) == continuation([5], 5)


def test_a_refusal_needs_no_step(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("bad", []))
    assert [o.finish_reason for o in run(core)["bad"]] == [FinishReason.ERROR]


# -- aborts, ends and resets in flight --------------------------------------------------------


@pytest.mark.parametrize("steps", range(4))
def test_an_abort_in_flight_frees_everything_and_says_nothing(
    make_core: MakeCore, steps: int
) -> None:
    core = make_core()
    core.add_request(request("a", range(3, 30), max_tokens=20))
    core.add_request(request("b", [6], max_tokens=9))
    before = collect(core, steps)
    core.abort_requests(["a", "a", "unknown"])
    after = run(core)
    assert after.keys() == {"b"}
    assert tokens([o for o in before if o.request_id == "b"] + after["b"]) == continuation([6], 9)
    assert core.scheduler.kv_cache_manager.usage == 0
    assert executor(core).tokens == {}


def test_an_abort_that_comes_during_a_step_is_seen_before_its_tokens(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(request("a", [5]))
    core.add_request(request("b", [6]))
    assert core.step_fn() == (None, True) or core.batch_queue
    core.abort_soon(["a"])
    assert "a" not in run(core)


def test_an_end_in_flight_wastes_a_token_that_nobody_sees(make_core: MakeCore) -> None:
    core = make_core()
    (token,) = continuation([5, 6], 3)[2:]
    core.add_request(request("a", [5, 6], max_tokens=50, stop_token_ids=[token]))
    outputs = run(core)["a"]
    assert tokens(outputs) == continuation([5, 6], 3)
    assert outputs[-1].stop_reason == token
    # The step behind the last one had been planned.
    assert len(executor(core).masks) == 4
    assert executor(core).tokens == {}


@pytest.mark.parametrize("steps", range(1, 6))
def test_the_cache_is_reset_with_requests_in_flight(make_core: MakeCore, steps: int) -> None:
    core = make_core(max_num_batched_tokens=16)
    prompts = {"a": [5, 6], "b": list(range(3, 40))}
    for name, prompt in prompts.items():
        core.add_request(request(name, prompt, prompt_logprobs=0))
    before = collect(core, steps)
    assert not core.reset_prefix_cache()
    assert core.reset_prefix_cache(reset_running_requests=True)
    after = run(core)
    for name, prompt in prompts.items():
        outputs = [o for o in before if o.request_id == name] + after[name]
        assert tokens(outputs) == continuation(prompt, 5)
        scored = [o for o in outputs if o.new_prompt_logprobs_tensors is not None]
        assert len(scored) == 1


# -- grammars ---------------------------------------------------------------------------------


class CountingGrammars:
    """The mask of a request is the number of tokens that its grammar has seen."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}
        self.validated: list[str] = []

    def is_ready(self, request: Request) -> bool:
        return True

    def grammar_bitmask(self, requests: Sequence[Request], drafts: Any) -> Any:
        rows = []
        for constrained in requests:
            name = constrained.request_id
            rows += [len(self.seen.get(name, ()))] * (1 + len(drafts.get(name, ())))
        return np.array([[row] for row in rows], np.int32)

    def accept_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        self.seen.setdefault(request.request_id, []).extend(token_ids)

    def validate_drafts(self, request: Request, token_ids: list[int]) -> list[int]:
        self.validated.append(request.request_id)
        return token_ids

    def release(self, request: Request) -> None:
        """Keeps what it has seen, for the test."""


def with_grammar(request_id: str, prompt: Sequence[int], **options: Any) -> Any:
    made = request(request_id, prompt, **options)
    assert isinstance(made.sampling_params, SamplingParams)
    made.sampling_params.structured_outputs = StructuredOutputsParams(regex=".*")
    return made


def test_sampling_waits_for_the_tokens_that_a_mask_needs(make_core: MakeCore) -> None:
    grammars = CountingGrammars()
    core = make_core({"structured_output_manager": grammars})
    core.add_request(with_grammar("a", [5, 6], max_tokens=6))
    core.add_request(request("b", [7], max_tokens=6))
    found = run(core)
    assert tokens(found["a"]) == grammars.seen["a"] == continuation([5, 6], 6)
    assert tokens(found["b"]) == continuation([7], 6)
    masks = [m for m in executor(core).masks if m is not None]
    assert [m.structured_output_request_ids for m in masks] == [["a"]] * 6
    # Each was made when all tokens before it were known.
    assert [m.grammar_bitmask.tolist() for m in masks] == [[[i]] for i in range(6)]


def test_the_model_runs_while_sampling_waits(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core({"structured_output_manager": CountingGrammars()})
    calls: list[str] = []

    def note(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(core.executor, "execute_model")
    note(core.executor, "sample_tokens")
    note(core.scheduler, "update_from_output")
    core.add_request(with_grammar("a", [5, 6], max_tokens=2))
    run(core)
    assert calls[:6] == [
        "execute_model",
        "sample_tokens",
        "execute_model",
        "update_from_output",
        "sample_tokens",
        "execute_model",
    ]


# -- drafts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_change_no_output(
    make_core: MakeCore, num_drafts: int, ahead: bool, grammar: bool
) -> None:
    grammars = CountingGrammars()
    hooks = {"structured_output_manager": grammars} if grammar else {}
    core = make_core(hooks, async_scheduling=ahead)
    executor(core).num_drafts = num_drafts
    core.scheduler.num_spec_tokens = num_drafts
    prompts = {f"{i}": [5 + i] * (1 + 3 * i) for i in range(6)}
    for name, prompt in prompts.items():
        make = with_grammar if grammar and int(name) % 2 else request
        core.add_request(make(name, prompt, max_tokens=25))
    found = run(core)
    for name, prompt in prompts.items():
        assert tokens(found[name]) == continuation(prompt, 25)
    # Fewer steps than tokens: drafts were accepted.
    assert executor(core).num_steps < 25
    assert set(grammars.validated) == ({"1", "3", "5"} if grammar else set())
    assert core.scheduler.kv_cache_manager.usage == 0


def test_nobody_asks_for_drafts_that_stay_with_the_worker(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    asked: list[None] = []
    monkeypatch.setattr(core.executor, "take_draft_token_ids", lambda: asked.append(None))
    core.add_request(request("a", [5, 6]))
    run(core)
    assert not asked


# -- pauses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pause_keeps_requests_and_collects_what_is_in_flight(
    make_core: MakeCore, ahead: bool
) -> None:
    core = make_core(async_scheduling=ahead)
    core.add_request(request("a", [5, 6], max_tokens=9))
    before = collect(core, 2)
    core.pause_scheduler()
    assert core.is_scheduler_paused()
    assert core.has_work() == ahead
    before += collect(core, 1)
    assert not core.has_work()
    count = executor(core).num_steps
    core.add_request(request("b", [7]))
    assert collect(core, 3) == []
    assert executor(core).num_steps == count
    core.abort_requests(["unknown"])
    assert not core.has_work()
    core.resume_scheduler()
    after = run(core)
    assert tokens(before + after["a"]) == continuation([5, 6], 9)
    assert tokens(after["b"]) == continuation([7], 5)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abort_during_a_pause_reaches_the_workers(make_core: MakeCore, ahead: bool) -> None:
    core = make_core(async_scheduling=ahead)
    core.add_request(request("a", [5, 6], max_tokens=9))
    collect(core, 2)
    core.pause_scheduler()
    core.abort_requests(["a"])
    assert run(core) == {}
    assert executor(core).tokens == {}
    assert core.reset_prefix_cache()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_cache_is_reset_during_a_pause(make_core: MakeCore, ahead: bool) -> None:
    core = make_core(async_scheduling=ahead)
    core.add_request(request("a", [5, 6], max_tokens=9))
    before = collect(core, 3)
    core.pause_scheduler()
    assert core.reset_prefix_cache(reset_running_requests=True)
    before += collect(core, 2)
    core.resume_scheduler()
    assert tokens(before + run(core)["a"]) == continuation([5, 6], 9)


# -- connectors -------------------------------------------------------------------------------


class SendingConnector:
    """Wants to send the KV of every request that ends."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.reports: list[Any] = []
        self.was_shut_down = False

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        """There is nothing to load."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None

    def update_connector_output(self, connector_output: Any) -> None:
        self.reports.append(connector_output)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any]]:
        self.sent.append(request.request_id)
        return True, {"remote": request.request_id}

    def reset_cache(self) -> bool:
        return True

    def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.mark.parametrize("ahead", [False, True])
def test_the_core_lives_while_blocks_wait_for_a_transfer(make_core: MakeCore, ahead: bool) -> None:
    connector = SendingConnector()
    core = make_core({"connector": connector}, async_scheduling=ahead)
    core.add_request(request("a", [5, 6, 7], max_tokens=2))
    outputs = []
    while core.has_unfinished_requests() or core.scheduler.has_finished_requests():
        outputs += collect(core, 1)
    assert tokens(outputs) == continuation([5, 6, 7], 2)
    assert outputs[-1].kv_transfer_params == {"remote": "a"}
    assert connector.sent == ["a"]
    # Nobody is left, and still a report is due: steps without tokens, further and further apart.
    core.step_fn()
    delays = []
    for _ in range(8):
        assert core.has_work()
        _, model_ran = core.step_fn()
        assert not model_ran
        delays.append(core.idle_delay(model_ran))
    assert delays == pytest.approx([0.002, 0.004, 0.008, 0.016, 0.02, 0.02, 0.02, 0.02])
    assert not core.reset_prefix_cache()
    assert core.idle_delay(True) == 0
    assert core.idle_delay(False) == pytest.approx(0.002)
    executor(core).kv_report = KVConnectorOutput(finished_sending={"a"})
    run(core)
    assert not core.has_work()
    assert connector.reports
    assert core.reset_prefix_cache()
    core.shutdown()
    assert connector.was_shut_down


def test_what_the_caller_brings_reaches_the_scheduler(make_core: MakeCore) -> None:
    hooks = {
        "structured_output_manager": CountingGrammars(),
        "connector": SendingConnector(),
        "ec_connector": SendingConnector(),
    }
    core = make_core(hooks)
    for name, hook in hooks.items():
        assert getattr(core.scheduler, name) is hook


def test_nothing_to_wait_for_is_no_reason_to_wait(make_core: MakeCore) -> None:
    core = make_core(async_scheduling=False)
    core.add_request(request("a", [5], max_tokens=1))
    _, model_ran = core.step_fn()
    assert core.idle_delay(model_ran) == 0
    # The workers have yet to hear of the end.
    assert core.idle_delay(False) == 0
    _, model_ran = core.step_fn()
    assert core.idle_delay(model_ran) == 0
    assert EOS not in continuation([5], 1)
