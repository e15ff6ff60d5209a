"""What do the scheduler and the KV cache cost without a model, beside vLLM's?

    python benchmarks/control_plane.py [--peer-python P --peer-script S --peer-model M]
    python benchmarks/control_plane.py --check
    python benchmarks/control_plane.py --plot DIR

The first form measures hashing a prompt token, admitting all prompts, and schedule plus update for
a running request in a decode step; the answer of the model is made outside the timing. With a peer,
both run one after the other in each round, the first of them in turn, each in a process of its own.
A ratio is the peer's figure over ours, once a round; its median and its range are printed.

--check exits with 1 when a decode step costs more than twice the budget. --plot draws how a decode
step grows with running requests, pool size and context. --clock cpu counts processor time, which
other processes on the machine hardly disturb; the check always uses it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from control_plane_curves import draw, measure_curves
from control_plane_peer import Peer, PeerError
from control_plane_workloads import (
    BORDER_BUDGET_US,
    CLOCKS,
    INSIDE_BUDGET_US,
    TOLERANCE,
    Workload,
    measure,
    measure_borders,
)

CHECKED_RUNNING = (64, 256, 1024)
FIGURES = {
    "hashing, ns/token": ("hashing_ns",),
    "admission, ms": ("admission_ms",),
    "decode step median, us/request": ("decode", "median_us"),
    "decode step mean, us/request": ("decode", "mean_us"),
    "decode step p99, us/request": ("decode", "p99_us"),
}
"""What is compared, and where it is in a result."""

Results = list[dict[str, Any]]


def measure_apart(workloads: list[Workload]) -> Results:
    """`measure` each workload in one fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps([asdict(w) for w in workloads])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    results: Results = json.loads(done.stdout.splitlines()[-1])
    return results


def run_rounds(workloads: list[Workload], peer: Peer | None, rounds: int, clock: str) -> Results:
    """Ours, ours with statistics, and the peer's, `rounds` times."""
    found = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds} ...", file=sys.stderr)
        results: dict[str, Any] = {}
        # Whoever comes second finds a warmer machine.
        for who in ("peer", "ours") if number % 2 else ("ours", "peer"):
            if who == "ours":
                results["ours"] = measure_apart(workloads)
            elif peer is not None:
                results["peer"] = peer.run(clock, lambda line: print(line, file=sys.stderr))
        found.append(results)
    return found


def figure(results: Results, workload: Workload, path: tuple[str, ...]) -> float | None:
    """One figure of the result for a workload; None if it was not measured."""
    for result in results:
        same = result["running"] == workload.running and result["groups"] == workload.groups
        # The peer's lines do not say: its script always collects statistics.
        if same and result.get("log_stats", workload.log_stats) == workload.log_stats:
            value: Any = result
            for key in path:
                value = value.get(key)
                if value is None:
                    return None
            return float(value)
    return None


def compare(rounds: Results, workloads: list[Workload]) -> Results:
    """A row for each workload and figure: medians over the rounds, and ratios round by round."""
    rows = []
    for workload in workloads:
        for name, path in FIGURES.items():
            ours = [figure(r["ours"], workload, path) for r in rounds]
            peers = [figure(r.get("peer", []), workload, path) for r in rounds]
            row: dict[str, Any] = {
                "running": workload.running,
                "groups": workload.groups,
                "log_stats": workload.log_stats,
                "figure": name,
                "ours": statistics.median(value for value in ours if value is not None),
            }
            pairs = [(a, b) for a, b in zip(ours, peers) if a is not None and b is not None]
            if pairs:
                ratios = [peer / our for our, peer in pairs]
                row["peer"] = statistics.median(peer for _, peer in pairs)
                row["ratio"] = statistics.median(ratios)
                row["ratio_range"] = [min(ratios), max(ratios)]
            rows.append(row)
    return rows


def print_rows(rows: Results) -> None:
    """The table: the peer's script collects statistics, so compare `on` with it."""
    last = None
    for row in rows:
        head = (row["groups"], row["running"], row["log_stats"])
        if head != last:
            last = head
            groups = "1 KV group" if head[0] == 1 else f"{head[0]} KV groups"
            title = f"{groups}, {head[1]} running, log_stats {'on' if head[2] else 'off'}"
            print(f"\n{title:<48} {'ours':>9} {'peer':>9} {'ratio':>7}  range")
        line = f"  {row['figure']:<46} {row['ours']:9.2f}"
        if "ratio" in row:
            low, high = row["ratio_range"]
            line += f" {row['peer']:9.2f} {row['ratio']:7.1f}  {low:.1f} to {high:.1f}"
        print(line)


def check(running: list[int], groups: list[int], periods: int) -> tuple[Results, bool]:
    """Measure steps inside blocks and over borders; whether all are within twice the budget."""
    limits = {"inside": TOLERANCE * INSIDE_BUDGET_US, "border": TOLERANCE * BORDER_BUDGET_US}
    print(
        f"steady decode, processor time; limits: {limits['inside']} us a request inside a block, "
        f"{limits['border']} us a request and KV group for a block that has filled"
    )
    print(f"{'groups':>8} {'running':>9} {'inside us':>11} {'border us':>11}")
    found: Results = []
    within = True
    for count in groups:
        for requests in running:
            result = measure_borders(Workload(requests, count, clock="cpu"), periods)
            over = [name for name, limit in limits.items() if result[f"{name}_us"] > limit]
            within = within and not over
            found.append({**result, "over": over})
            print(
                f"{count:8} {requests:9} {result['inside_us']:11.2f} {result['border_us']:11.2f}"
                + (f"  too much: {', '.join(over)}" if over else "")
            )
    return found, within


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--running", type=int, nargs="+", help="default: 256 1024")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens, half of them shared")
    parser.add_argument("--blocks", type=int, default=400_000)
    parser.add_argument("--steps", type=int, default=100, help="decode steps to measure")
    parser.add_argument("--peer-python", type=Path, help="the peer's interpreter")
    parser.add_argument("--peer-script", type=Path, help="what measures the peer")
    parser.add_argument("--peer-model", type=Path, help="a model folder that the script reads")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    parser.add_argument("--check", action="store_true", help="only check the budgets")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="only measure and draw curves")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    given = [args.peer_python, args.peer_script, args.peer_model]
    if any(given) and not all(given):
        parser.error("a peer needs all of --peer-python, --peer-script and --peer-model")
    for path in given:
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'jubako[bench]'")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure what was asked for; 1 if a budget is exceeded, 2 if the peer does not run."""
    args = parse(argv)
    if args.measure:
        print(json.dumps([measure(Workload(**fields)) for fields in json.loads(args.measure)]))
        return 0
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "clock": args.clock,
    }
    status = 0
    if args.check:
        running = args.running or list(CHECKED_RUNNING)
        report["budgets"], within = check(running, args.groups, periods=max(args.steps // 16, 1))
        status = 0 if within else 1
    if args.plot:
        report["curves"] = measure_curves(args.clock)
        for path in draw(report["curves"], args.plot):
            print(path)
    if not (args.check or args.plot):
        peer = None
        if args.peer_python:
            peer = Peer(args.peer_python.absolute(), args.peer_script, args.peer_model)
        workloads = [
            Workload(
                running,
                groups,
                prompt=args.prompt,
                shared=args.prompt // 2,
                blocks=args.blocks,
                log_stats=log_stats,
                steps=args.steps,
                clock=args.clock,
            )
            for groups in args.groups
            for running in args.running or [256, 1024]
            for log_stats in (False, True)
        ]
        try:
            report["rounds"] = run_rounds(workloads, peer, args.rounds, args.clock)
        except PeerError as error:
            print(error, file=sys.stderr)
            return 2
        report["table"] = compare(report["rounds"], workloads)
        print_rows(report["table"])
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
