"""The benchmarks: their figures on known times, their requests, their reports, their errors."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jubako.entrypoints.benchmarking import plots, startup_probe
from jubako.entrypoints.benchmarking.figures import (
    RequestTimes,
    distribution,
    percentile,
    spread,
    summarise,
)
from jubako.entrypoints.benchmarking.offline import measure
from jubako.entrypoints.benchmarking.serving import read_events, send_times
from jubako.entrypoints.benchmarking.traces import read_trace
from jubako.entrypoints.benchmarking.workloads import FIXED, fixed, uniform
from jubako.entrypoints.cli import main
from jubako.errors import ConfigError
from jubako.frontend.llm_engine import LLMEngine
from tests.exactness import oracle
from tests.serving.conftest import Serve, serve

__all__ = ["serve"]

Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


# -- figures ----------------------------------------------------------------------------------


def test_percentiles_lie_between_their_neighbours() -> None:
    values = [40.0, 10.0, 20.0, 30.0]
    assert percentile(values, 0) == 10
    assert percentile(values, 50) == 25
    assert percentile(values, 100) == 40
    assert percentile([float(i) for i in range(101)], 95) == 95
    assert percentile([7.0], 99) == 7
    assert math.isnan(percentile([], 50))
    assert distribution([]) is None
    assert distribution(values) == pytest.approx({"mean": 25, "p50": 25, "p95": 38.5, "p99": 39.7})
    assert spread([3.0, 1.0, 2.0]) == {"median": 2, "min": 1, "max": 3, "runs": [3, 1, 2]}


def test_a_run_is_summarised() -> None:
    requests = [
        RequestTimes(1.0, [1.5, 1.6, 1.8], input_tokens=10, output_tokens=3),
        RequestTimes(1.0, [2.0], input_tokens=20, output_tokens=1),
        RequestTimes(1.0, [1.1], input_tokens=5, output_tokens=1, error="HTTP 500"),
        RequestTimes(1.0),
    ]
    figures = summarise(requests, 2.0)
    assert (figures["completed"], figures["failed"]) == (2, 2)
    assert figures["errors"] == {"HTTP 500": 1, "no output": 1}
    assert (figures["input_tokens"], figures["output_tokens"]) == (30, 4)
    assert figures["output_tokens_per_second"] == 2
    assert figures["total_tokens_per_second"] == 17
    assert figures["ttft_ms"]["p50"] == pytest.approx(750)
    assert figures["tbt_ms"]["p50"] == pytest.approx(150)
    assert figures["tpot_ms"]["mean"] == pytest.approx(150)
    assert figures["e2e_ms"]["p50"] == pytest.approx(900)


# -- requests ---------------------------------------------------------------------------------


def test_fixed_workloads_are_the_same_every_time() -> None:
    workloads = fixed("all")
    assert [w.name for w in workloads] == list(FIXED)
    batch = workloads[list(FIXED).index("batch-8")]
    prompts = batch.prompts(262_144)
    assert [len(p) for p in prompts] == [128] * 8
    assert prompts == batch.prompts(262_144)
    assert len({tuple(p) for p in prompts}) == 8
    assert all(p[0] == 2 and min(p[1:]) >= 1000 and max(p) < 100_000 for p in prompts)
    assert max(map(max, batch.prompts(50))) < 50


MOONCAKE = [
    {"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 2000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]},
    {"timestamp": 2500, "input_length": 100, "output_length": 7},
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
AZURE += "2023-11-16 18:15:50.9305900,396,109\n"


def write_trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)) + "\n")
    return path


def test_a_trace_with_hashes_repeats_what_it_repeats(tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path))
    assert [s.arrival for s in workload.shapes] == [0, 1.5, 2.0]
    assert [s.output_len for s in workload.shapes] == [5, 6, 7]
    first, second, third = workload.prompts(10_000)
    assert [len(first), len(second), len(third)] == [600, 700, 100]
    assert first[:512] == second[:512] != third[:100]
    assert first[512:600] != second[512:600]
    assert len(read_trace(write_trace(tmp_path), 2).shapes) == 2


def test_a_trace_without_hashes_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    workload = read_trace(path)
    assert [(s.input_len, s.output_len) for s in workload.shapes] == [(374, 44), (396, 109)]
    assert workload.shapes[1].arrival == pytest.approx(4.25)
    first, second = workload.prompts(10_000)
    assert first != second[:374]


@pytest.mark.parametrize(
    "text",
    ["", "{}\n", "no json\n", "[1]\n", '{"timestamp": 0, "input_length": 0, "output_length": 1}\n'],
)
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace=.*bad\.jsonl"):
        read_trace(path)


def test_poisson_arrivals_have_the_rate_that_was_asked_for() -> None:
    workload = uniform("random", 4000, 4, 4)
    moments = send_times(workload, 50.0)
    assert moments == sorted(moments)
    assert moments == send_times(workload, 50.0)
    assert moments != send_times(workload, 50.0, seed=1)
    assert len(moments) / moments[-1] == pytest.approx(50, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    # Of exponential gaps 63 % are shorter than their mean.
    assert sum(gap < 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)
    assert set(send_times(workload, math.inf)) == {0.0}


# -- streams ----------------------------------------------------------------------------------


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_a_stream_is_read_after_the_run() -> None:
    whole = event(choices=[{"text": "a", "finish_reason": None}])
    pieces = [
        (1.0, whole[:9]),
        (1.5, whole[9:]),
        (2.0, event(choices=[{"text": "b", "finish_reason": "length"}])),
        (2.5, event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})),
        (2.5, b"data: [DONE]\n\n"),
    ]
    times = read_events(0.5, pieces, None, 9)
    assert times.arrivals == [1.5, 2.0]
    assert (times.input_tokens, times.output_tokens, times.error) == (7, 3, None)
    assert read_events(0.5, pieces[:-1], None, 9).error == "the stream ended early"
    failed = read_events(0.5, [(1.0, event(error={"message": "no"}))], None, 9)
    assert "no" in str(failed.error)


def test_a_chat_begins_with_its_first_text() -> None:
    pieces = [
        (1.0, event(choices=[{"delta": {"role": "assistant"}, "finish_reason": None}])),
        (2.0, event(choices=[{"delta": {"content": "hi"}, "finish_reason": None}])),
        (3.0, event(choices=[{"delta": {}, "finish_reason": "stop"}])),
        (3.0, b"data: [DONE]\n\n"),
    ]
    assert read_events(0.0, pieces, None, 1).arrivals == [2.0]


# -- commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["latency", "--input-len", "0"], "input_len=0"),
        (["throughput", "--num-prompts", "-1"], "num_prompts=-1"),
        (["latency", "--num-runs", "0"], "num_runs=0"),
        (["latency", "--workload", "decode-2"], "workload='decode-2'"),
        (["latency", "--workload", "all", "--input-len", "3"], "workload=all"),
        (["latency", "--trace", "/no/such"], "trace='/no/such'"),
        (["latency", "--output", "/no/such/file"], "output='/no/such/file'"),
        (["serve", "--request-rate", "0"], "request_rate=0.0"),
        (["serve", "--max-concurrency", "2,0"], "max_concurrency=0"),
        (["serve", "--max-concurrency", "x"], "max_concurrency='x'"),
        (["serve", "--base-url", "http://127.0.0.1:1"], "base_url='http://127.0.0.1:1'"),
        (["startup", "--num-runs", "0"], "num_runs=0"),
        (["fly"], "'fly'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_said_in_one_line(capsys: Capture, arguments: list[str], said: str) -> None:
    assert run("bench", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "tiny-llama"
    oracle.make_model("llama", folder)
    return folder


OPTIONS = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1"]


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_an_engine_in_this_process(model: Path, tmp_path: Path, capsys: Capture, kind: str) -> None:
    path = tmp_path / "report.json"
    arguments = ["--input-len", "5", "--output-len", "4", "--num-prompts", "3", "--num-runs", "2"]
    arguments += ["--model", str(model), "--output", str(path), *OPTIONS]
    assert run("bench", kind, *arguments) == 0
    assert "random" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["benchmark"] == kind
    assert report["environment"]["cpu"]
    assert report["options"]["model"] == str(model)
    (result,) = report["results"]
    assert (result["completed"], result["failed"]) == (3, 0)
    assert (result["input_tokens"], result["output_tokens"]) == (15, 12)
    assert len(result["spread"]["seconds"]["runs"]) == 2
    assert result["ttft_ms"].keys() == {"mean", "p50", "p95", "p99"}


def test_runs_do_not_find_what_earlier_ones_cached(model: Path) -> None:
    from jubako.config import JubakoConfig

    options = {"model": str(model), "dtype": "float32", "device": "cpu", "num_threads": 1}
    engine = LLMEngine(JubakoConfig.from_options(options))
    try:
        measure(engine, uniform("random", 1, 100, 2), num_warmups=1, num_runs=2)
        assert engine.get_metrics()["prefix_cache_hits"] == 0
        with pytest.raises(ConfigError, match="max_model_len="):
            measure(engine, uniform("random", 1, 10**6, 2), num_warmups=0, num_runs=1)
    finally:
        engine.shutdown()


def test_a_server(serve: Serve, tmp_path: Path, capsys: Capture) -> None:
    served = serve()
    path, folder = tmp_path / "report.json", tmp_path / "plots"
    arguments = ["--base-url", served.url, "--num-prompts", "4", "--input-len", "6"]
    arguments += ["--output-len", "3", "--max-concurrency", "1,2", "--vocab-size", "60"]
    arguments += ["--output", str(path)]
    assert run("bench", "serve", *arguments) == 0, capsys.readouterr()
    results = json.loads(path.read_text())["results"]
    assert [r["max_concurrency"] for r in results] == [1, 2]
    assert all((r["completed"], r["failed"]) == (4, 0) for r in results)
    assert all(r["output_tokens"] == 12 for r in results)
    assert all(r["client_cpu_seconds"] > 0 for r in results)
    pytest.importorskip("matplotlib")
    files = plots.draw(results, folder)
    assert {f.name for f in files} == {"ttft.png", "tbt.png", "throughput.png"}
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


class _Broken(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(503, "busy")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def broken_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Broken)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_errors_are_counted(broken_server: str, capsys: Capture) -> None:
    arguments = ["--base-url", broken_server, "--model", "m", "--num-prompts", "3"]
    assert run("bench", "serve", *arguments) == 1
    assert "3 failed: HTTP 503" in capsys.readouterr().out


def test_no_more_requests_are_open_than_were_asked_for() -> None:
    from jubako.entrypoints.benchmarking import serving

    open_now, most = 0, 0

    async def exchange(*arguments: Any) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "_exchange", exchange)
        asyncio.run(
            serving.run(
                serving.Target("http://127.0.0.1:1", "m"),
                uniform("random", 9, 4, 4),
                moments=[0.0] * 9,
                max_concurrency=3,
                vocab_size=50,
            )
        )
    assert most == 3


def test_the_probe_wraps_a_module_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "jubako.entrypoints.benchmarking.plots"
    monkeypatch.delitem(sys.modules, name)
    seen: list[Any] = []
    finder: Any = startup_probe._AfterImport(name, seen.append)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    __import__(name)
    assert [module.__name__ for module in seen] == [name]
    assert hasattr(seen[0], "draw")
