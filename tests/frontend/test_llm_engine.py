"""The engine for programs that block, with the core here and in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from jubako.errors import (
    CheckpointError,
    EngineDeadError,
    ModelNotFoundError,
    ValidationError,
)
from jubako.frontend.llm_engine import LLMEngine
from jubako.outputs import RequestOutput
from jubako.sampling_params import RequestOutputKind as Kind
from jubako.sampling_params import SamplingParams
from tests.engine.fakes import FAIL, SLOW, continuation
from tests.frontend.driver import ids_of, tokenizer

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module", params=[False, True], ids=["inproc", "multiprocess"])
def engine(request: pytest.FixtureRequest, make_config: Any) -> Iterator[LLMEngine]:
    made = LLMEngine(make_config(), multiprocess=request.param)
    yield made
    made.shutdown()


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 6, "output_kind": Kind.FINAL_ONLY, **options}
    )


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    assert engine.step() == []
    return found


def test_text_in_and_text_out(engine: LLMEngine) -> None:
    engine.add_request("text", "hello", greedy())
    engine.add_request("ids", ids_of("hello"), greedy())
    found = run(engine)
    expected = continuation(ids_of("hello"), 6)
    for name in ("text", "ids"):
        (output,) = found[name]
        assert output.finished
        assert output.prompt_token_ids == ids_of("hello")
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == tokenizer.decode(expected)
        assert output.outputs[0].finish_reason == "length"
    assert found["text"][0].prompt == "hello"
    assert found["ids"][0].prompt is None


def test_deltas(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", greedy(output_kind=Kind.DELTA))
    outputs = run(engine)["a"]
    tokens = [t for o in outputs for t in o.outputs[0].token_ids]
    assert tokens == continuation(ids_of("hello"), 6)
    assert [o.finished for o in outputs] == [False] * 5 + [True]


def test_a_request_that_cannot_be_sent_is_not_open(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object) -> None:
        raise ValueError("no way")

    with monkeypatch.context() as patch:
        patch.setattr(engine.client, "add_request", refuse)
        with pytest.raises(ValueError, match="no way"):
            engine.add_request("a", "hello", greedy(n=2))
    assert not engine.has_unfinished_requests()


def test_several_answers(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", greedy(n=3))
    (output,) = run(engine)["a"]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        assert completion.token_ids == continuation(ids_of("hello"), 6)


def test_a_stop_string_ends_the_request_early(engine: LLMEngine) -> None:
    full = tokenizer.decode(continuation(ids_of("hello"), 40))
    stop = full[0]
    engine.add_request("a", "hello", greedy(max_tokens=100, stop=[stop]))
    (output,) = run(engine)["a"]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert stop not in output.outputs[0].text
    engine.add_request("b", "next", greedy())
    assert run(engine)["b"][0].finished


def test_equal_ids_are_told_apart(engine: LLMEngine) -> None:
    first = engine.add_request("same", "one", greedy())
    second = engine.add_request("same", "two", greedy())
    assert first != second
    outputs = run(engine)["same"]
    assert {o.prompt for o in outputs} == {"one", "two"}


def test_an_abort(engine: LLMEngine) -> None:
    engine.add_request("gone", "one", greedy(max_tokens=None))
    engine.add_request("kept", "two", greedy())
    engine.abort_request("gone")
    engine.abort_request(["gone", "unknown"])
    assert engine.num_unfinished_requests == 1
    assert run(engine).keys() == {"kept"}


def test_a_bad_request_changes_nothing(engine: LLMEngine) -> None:
    with pytest.raises(ValidationError):
        engine.add_request("bad", "x" * 500, greedy())
    assert not engine.has_unfinished_requests()


def test_prefix_cache(engine: LLMEngine) -> None:
    prompt = "a prompt of some length"
    hits = []
    for _ in range(2):
        engine.add_request("a", prompt, greedy())
        hits.append(run(engine)["a"][0].num_cached_tokens)
    assert hits == [0, 20]
    assert engine.reset_prefix_cache()
    engine.add_request("a", prompt, greedy())
    assert run(engine)["a"][0].num_cached_tokens == 0


def test_metrics(engine: LLMEngine) -> None:
    before = engine.get_metrics()["generation_tokens"]
    engine.add_request("a", "hello", greedy())
    (output,) = run(engine)["a"]
    metrics = engine.get_metrics()
    assert metrics["generation_tokens"] - before == 6
    assert metrics["request_success"]["length"] >= 1
    times = output.metrics
    assert times is not None
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts


def test_without_statistics(make_config: Any) -> None:
    engine = LLMEngine(make_config(disable_log_stats=True))
    engine.add_request("a", "hello", greedy())
    assert run(engine)["a"][0].finished
    with pytest.raises(ValidationError, match="disable_log_stats"):
        engine.get_metrics()
    engine.shutdown()


def test_interval_of_the_stream(make_config: Any) -> None:
    engine = LLMEngine(make_config(stream_interval=4))
    engine.add_request("a", "hello", greedy(max_tokens=10, output_kind=Kind.DELTA))
    assert [len(o.outputs[0].token_ids) for o in run(engine)["a"]] == [1, 4, 4, 1]
    engine.shutdown()


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_dead_core_closes_every_request(make_config: Any, multiprocess: bool) -> None:
    engine = LLMEngine(make_config(), multiprocess=multiprocess)
    engine.add_request("a", [SLOW], greedy(max_tokens=100))
    # Last: nothing can be added once the core has died of it.
    engine.add_request("b", [FAIL], greedy())
    with pytest.raises((RuntimeError, EngineDeadError)):
        run(engine)
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        engine.add_request("c", [5], greedy())
    engine.shutdown()


def test_a_killed_core(make_config: Any) -> None:
    engine = LLMEngine(make_config(), multiprocess=True)
    engine.add_request("a", [5], greedy(max_tokens=None))
    os.kill(engine.client.pid, signal.SIGKILL)  # type: ignore[union-attr]
    with pytest.raises(EngineDeadError):
        run(engine)
    engine.shutdown()


@pytest.mark.parametrize("multiprocess", [False, True])
def test_no_model_is_one_clear_error(make_config: Any, multiprocess: bool) -> None:
    children = len(psutil.Process().children())
    with pytest.raises(ModelNotFoundError) as caught:
        LLMEngine(make_config(model="/nowhere"), multiprocess=multiprocess)
    assert "\n" not in caught.value.message
    with pytest.raises(ModelNotFoundError, match="tokeniser"):
        LLMEngine(make_config(tokenizer="/nowhere"), multiprocess=multiprocess)
    assert len(psutil.Process().children()) == children


def test_a_model_without_tokenizer(make_config: Any, tmp_path: Any, model_folder: Any) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLMEngine(make_config(model=str(tmp_path)))


def test_shutdown_twice(make_config: Any) -> None:
    engine = LLMEngine(make_config())
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        engine.add_request("a", [5], greedy())
