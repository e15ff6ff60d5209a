"""Do the control-plane benchmarks measure what they say? No time is asserted here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import control_plane
import control_plane_curves as curves
import control_plane_workloads as workloads
import pytest
from control_plane_peer import Peer, PeerError, read_lines
from control_plane_workloads import BLOCK, Engine, Workload, draw_prompts, measure

TINY = [
    "--running",
    "3",
    "5",
    "--prompt",
    "64",
    "--blocks",
    "600",
    "--steps",
    "20",
    "--rounds",
    "2",
]

FAKE_PEER = """
import statistics, sys, time
time.perf_counter()
print("something else", sys.argv[1:])
for hybrid in (False, True):
    median = statistics.median(ms / 1e3 for ms in [1.0, 2.0, 6.0])
    print(f"vllm hybrid={hybrid} running=3: hashing 900000 ns/token, prefill 12 ms, "
          f"decode step {median * 1e3:.2f} ms = 0.1 us/request", flush=True)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    (tmp_path / "peer.py").write_text(FAKE_PEER)
    return Peer(Path(sys.executable), tmp_path / "peer.py", tmp_path)


def tiny(**values: Any) -> Workload:
    return Workload(**{"running": 4, "prompt": 64, "shared": 32, "blocks": 500, **values})


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("log_stats", [False, True])
def test_a_workload_admits_all_and_decodes_all(groups: int, log_stats: bool) -> None:
    workload = tiny(groups=groups, log_stats=log_stats, steps=10)
    engine = Engine(workload)
    prompts = list(draw_prompts(workload))
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    engine.add(prompts)
    assert len(engine.admit()) == 1
    requests = list(engine.scheduler.requests.values())
    before = sum(request.num_tokens for request in requests)
    assert all(request.num_tokens > 64 for request in requests)
    for _ in range(10):
        engine.step()
    assert sum(request.num_tokens for request in requests) == before + 40
    assert [request.num_cached_tokens for request in requests] == [0, 32, 32, 32]
    manager = engine.scheduler.kv_cache_manager
    assert manager.num_kv_cache_groups == groups
    assert (manager.prefix_cache_stats is not None) == log_stats


def test_a_prompt_in_pieces_gets_its_first_token_with_the_last() -> None:
    workload = tiny(running=2, budget=48)
    engine = Engine(workload)
    engine.add(draw_prompts(workload))
    # Half of each step for each, so that nothing is cached when the other begins.
    assert len(engine.admit()) == 3
    assert min(request.num_tokens for request in engine.scheduler.requests.values()) == 65


def test_a_measurement_has_every_figure() -> None:
    result = measure(tiny(steps=3))
    assert result["running"] == 4
    assert result["admission_steps"] >= 1
    names = {f"{name}_{unit}" for name in ("median", "mean", "p99") for unit in ("ms", "us")}
    assert set(result["decode"]) == names
    assert all(value > 0 for value in result["decode"].values())
    assert result["hashing_ns"] > 0


def test_a_step_is_summed_up_by_median_mean_and_99th_percentile() -> None:
    found = workloads.summary([1e-3] * 98 + [3e-3, 201e-3], running=10)
    assert found["median_ms"] == pytest.approx(1)
    assert found["mean_ms"] == pytest.approx(3.02)
    assert found["p99_ms"] == pytest.approx(3 + 0.01 * 198)
    assert found["mean_us"] == pytest.approx(302)


def test_borders_are_told_from_the_steps_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that fill a block and those after them cost 9 and 3 more for each request."""
    engine_step = Engine.step
    seconds = iter([0.0] + [(10, 4, *[1] * 14)[i % BLOCK] * 5e-6 for i in range(3 * BLOCK)])

    def step(self: Engine) -> float:
        engine_step(self)
        return next(seconds)

    monkeypatch.setattr(Engine, "step", step)
    result = workloads.measure_borders(tiny(running=5, groups=2), periods=2)
    assert result["inside_us"] == pytest.approx(1)
    assert result["border_us"] == pytest.approx(6)


def test_a_point_is_taken_over_whole_blocks_in_a_pool_without_fresh_ones() -> None:
    engine = Engine(tiny(groups=6))
    engine.fill_cache()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 499
    assert all(block.block_hash is not None for block in pool.blocks if not block.is_null)
    point = workloads.measure_point(tiny(steps=2 * BLOCK), full_cache=True, repeats=2)
    assert point["blocks"] == 500
    assert point["mean_us"] > 0


def test_the_script_compares_rounds(tmp_path: Path, peer: Peer, capsys: Any) -> None:
    output = tmp_path / "report.json"
    arguments = ["--peer-python", str(peer.python), "--peer-script", str(peer.script)]
    arguments += ["--peer-model", str(peer.model), "--output", str(output)]
    assert control_plane.main(TINY + arguments) == 0
    printed = capsys.readouterr().out
    assert "6 KV groups, 5 running, log_stats on" in printed
    report = json.loads(output.read_text())
    assert [set(entry) for entry in report["rounds"]] == [{"ours", "peer"}] * 2
    assert len(report["table"]) == 2 * 2 * 2 * len(control_plane.FIGURES)
    for row in report["table"]:
        assert row["ours"] > 0
        # The peer has no figures for 5.
        assert ("ratio" in row) == (row["running"] == 3)
        if "ratio" in row:
            low, high = row["ratio_range"]
            assert 0 < low <= row["ratio"] <= high
    assert {row.get("peer") for row in report["table"] if "admission" in row["figure"]} == {
        None,
        12,
    }


def test_the_script_needs_no_peer(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "report.json"
    assert control_plane.main([*TINY, "--groups", "1", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert [set(entry) for entry in report["rounds"]] == [{"ours"}] * 2
    assert not any("ratio" in row for row in report["table"])


def test_a_ratio_is_the_peers_figure_over_ours() -> None:
    def entry(ours: float, peer: float) -> dict[str, Any]:
        decode = {"median_us": ours, "mean_us": ours, "p99_us": ours}
        own = {**measured, "hashing_ns": ours, "admission_ms": ours, "decode": decode}
        other = {**measured, "hashing_ns": peer, "admission_ms": peer, "decode": {}}
        del other["log_stats"]
        return {"ours": [own], "peer": [other]}

    measured = {"running": 7, "groups": 1, "log_stats": True}
    rounds = [entry(1, 10), entry(2, 60), entry(1, 20)]
    rows = control_plane.compare(rounds, [Workload(7, log_stats=True)])
    hashing = rows[0]
    assert (hashing["ours"], hashing["peer"], hashing["ratio"]) == (1, 20, 20)
    assert hashing["ratio_range"] == [10, 30]
    assert "ratio" not in rows[-1], "the peer said nothing of p99"


def test_the_peers_own_lines_are_read() -> None:
    line = (
        "vllm hybrid=True running=256: hashing 525 ns/token, prefill 117 ms, "
        "decode step 6.40 ms = 25.0 us/request"
    )
    (plain,) = read_lines(f"a warning\n{line}\n")
    assert plain["groups"] == 6
    assert plain["hashing_ns"] == plain["hashing_printed_ns"] == 525
    assert plain["decode"] == {"median_ms": 6.4, "median_us": pytest.approx(25)}
    said = f"drawing 1.25e-07 s/token\nsteps: mean 0.0128 s, p99 0.0256 s\n{line}"
    (more,) = read_lines(said)
    assert more["hashing_ns"] == pytest.approx(400)
    assert more["decode"]["mean_us"] == pytest.approx(50)
    assert more["decode"]["p99_ms"] == pytest.approx(25.6)


@pytest.mark.parametrize("clock", workloads.CLOCKS)
def test_a_peer_is_run_as_it_is(peer: Peer, clock: str) -> None:
    told: list[str] = []
    single, hybrid = peer.run(clock, told.append)
    assert len(told) == 2
    assert (single["groups"], hybrid["groups"]) == (1, 6)
    assert single["decode"]["median_ms"] == 2
    assert single["decode"]["mean_ms"] == pytest.approx(3)
    assert 0 < single["hashing_ns"] < single["hashing_printed_ns"]


@pytest.mark.parametrize(
    ("code", "message"),
    [("raise SystemExit('no such model')", "no such model"), ("print('?')", "could be read")],
)
def test_a_peer_that_does_not_work_is_told(
    tmp_path: Path, peer: Peer, capsys: Any, code: str, message: str
) -> None:
    peer.script.write_text(code)
    with pytest.raises(PeerError, match=message):
        peer.run("wall")
    arguments = ["--peer-python", str(peer.python), "--peer-script", str(peer.script)]
    arguments += ["--peer-model", str(peer.model), "--groups", "1"]
    assert control_plane.main(TINY + arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer-python", sys.executable], "needs all of"),
        (
            ["--peer-python", "/none", "--peer-script", "/none", "--peer-model", "/none"],
            "not exist",
        ),
        (["--clock", "sand"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_status:
        control_plane.main(arguments)
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(control_plane, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        control_plane.main(["--plot", str(tmp_path)])
    assert "pip install 'jubako[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inside", "border", "status", "over"),
    [
        (1.99, 9.99, 0, []),
        (2.01, 9.99, 1, ["inside"]),
        (1.99, 10.01, 1, ["border"]),
    ],
)
def test_the_check_fails_above_twice_the_budget(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    inside: float,
    border: float,
    status: int,
    over: list[str],
) -> None:
    measured = []

    def measure_borders(workload: Workload, periods: int) -> dict[str, Any]:
        measured.append((workload.groups, workload.running))
        cheap = workload.running != 1024
        return {
            "running": workload.running,
            "groups": workload.groups,
            "inside_us": 0.5 if cheap else inside,
            "border_us": 0.5 if cheap else border,
        }

    monkeypatch.setattr(control_plane, "measure_borders", measure_borders)
    output = tmp_path / "report.json"
    assert control_plane.main(["--check", "--output", str(output)]) == status
    assert measured == [(groups, running) for groups in (1, 6) for running in (64, 256, 1024)]
    assert json.loads(output.read_text())["budgets"][-1]["over"] == over


def test_the_check_measures(capsys: Any) -> None:
    control_plane.main(["--check", "--running", "2", "--steps", "16"])
    assert capsys.readouterr().out.count("\n") == 4


def test_curves_vary_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "STEPS", BLOCK)
    told: list[str] = []
    points = curves.by_running("cpu", [1, 3])
    assert [(p["groups"], p["running"]) for p in points] == [(1, 1), (1, 3), (6, 1), (6, 3)]
    assert {(p["prompt"], p["clock"]) for p in points} == {(64, "cpu")}
    points = curves.by_pool("wall", [800, 1000])
    assert [p["blocks"] for p in points] == [800, 1000] * 2
    assert len({(p["running"], p["prompt"]) for p in points}) == 1
    points = curves.by_context("wall", [32, 64])
    assert [(p["prompt"], p["shared"]) for p in points[-4:]] == [(32, 16), (64, 32)] * 2
    small = {"prompt": ("prompt tokens", lambda clock: points)}
    monkeypatch.setattr(curves, "CURVES", small)
    assert curves.measure_curves("wall", told.append) == {"prompt": points}
    assert len(told) == len(points) + 1


def test_a_curve_is_drawn_as_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `bench`")
    fields = {"groups": 1, "shared": 0, "mean_ms": 0.2, "median_ms": 0.1}
    points = [{**fields, "running": 1}, {**fields, "running": 8}]
    for _ in range(2):
        (path,) = curves.draw({"running": points}, tmp_path / "plots")
    assert path.name == "control_plane_running.svg"
    text = path.read_text()
    assert "<svg" in text
    curves.draw({"running": points}, tmp_path / "again")
    assert (tmp_path / "again" / path.name).read_text() == text
