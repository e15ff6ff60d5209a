"""Where the time of a step goes: spans, their sums, and the trace that a viewer reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jubako.entrypoints.cli import main
from jubako.entrypoints.profiling import recorder as recording
from jubako.entrypoints.profiling.recorder import STEP, Recorder, Span, totals, write_trace
from jubako.kernels.interface import Kernels
from jubako.kernels.registry import available, get_kernels
from tests.exactness import oracle

Capture = pytest.CaptureFixture[str]


class Clock:
    """Nanoseconds as the test says."""

    now = 0

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recording, "time", clock)
    return clock


def record(clock: Clock) -> list[Span]:
    """A step of 100 ns: 10 of its own, 20 planning, 70 in the model, of which 50 in two ops."""
    recorder = Recorder()
    with recorder.span(STEP):
        clock.now += 10
        with recorder.span("schedule"):
            clock.now += 20
        with recorder.span("model"):
            clock.now += 70
            recorder.add(["matmul", "norm"], ["op 0", "op 1"], [30, 20])
    return recorder.spans


def test_each_moment_counts_once(clock: Clock) -> None:
    parts = {part["part"]: part for part in totals(record(clock))}
    nanoseconds = {name: round(1e9 * part["seconds"]) for name, part in parts.items()}
    assert nanoseconds == {
        "matmul": 30,
        "norm": 20,
        "schedule": 20,
        "model": 20,
        "rest of the step": 10,
    }
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert next(iter(parts)) == "matmul"


def test_an_error_leaves_no_span_open(clock: Clock) -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.span(STEP), recorder.span("model"):
        raise KeyError
    with recorder.span(STEP):
        clock.now += 5
    assert [span.depth for span in recorder.spans] == [1, 0, 0]


def check_trace(path: Path) -> list[str]:
    """Names of the events of a trace; each must lie inside the one before it or behind it."""
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    spans = [event for event in events if event["ph"] == "X"]
    open_until: list[float] = []
    for event in spans:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        while open_until and event["ts"] >= open_until[-1] - 1e-6:
            open_until.pop()
        if open_until:
            # Ops are timed by a clock of their own; a viewer rounds as much.
            assert event["ts"] + event["dur"] <= open_until[-1] + 1
        open_until.append(event["ts"] + event["dur"])
    return [event["name"] for event in spans]


def test_the_trace_is_nested(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(record(clock), path)
    assert check_trace(path) == [STEP, "schedule", "model", "matmul", "norm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "tiny-llama"
    oracle.make_model("llama", folder)
    return folder


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_profile(model: Path, tmp_path: Path, capsys: Capture, kernels: str) -> None:
    if kernels not in available():
        pytest.skip("the native kernels are not built")
    trace, path = tmp_path / "trace.json", tmp_path / "report.json"
    arguments = ["--model", str(model), "--dtype", "float32", "--device", "cpu"]
    arguments += ["--num-threads", "1", "--kernels", kernels, "--input-len", "6"]
    arguments += ["--output-len", "4", "--num-prompts", "2"]
    arguments += ["--trace-output", str(trace), "--output", str(path)]
    assert main(["profile", *arguments]) == 0
    assert "ms a step" in capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    parts = {part["part"] for part in result["parts"]}
    assert parts >= {"schedule", "prepare", "model", "sample", "update", "detokenise"}
    attention = "op attention" if kernels == "cpu" else "kernel paged_attention"
    assert parts & {"op attention", "kernel paged_attention"} == {attention}
    assert sum(part["share"] for part in result["parts"]) == pytest.approx(1)
    names = check_trace(trace)
    assert names.count(STEP) == result["steps"] == 4
    # Others in this process run as if nothing had been.
    assert not set(vars(Kernels)) & set(vars(get_kernels()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "all"], "workload=all"),
        (["--output-len", "0"], "output_len=0"),
        (["--async-scheduling"], "async_scheduling=True"),
        (["--trace-output", "/no/such/file"], "trace_output='/no/such/file'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_said_in_one_line(capsys: Capture, arguments: list[str], said: str) -> None:
    assert main(["profile", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
