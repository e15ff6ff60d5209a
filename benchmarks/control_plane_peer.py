"""What does vLLM's scheduler cost on the same workloads?

A script of the peer's own is run with the peer's interpreter, and its printed lines are read:

    vllm hybrid=False running=256: hashing 525 ns/token, prefill 117 ms, decode step 6.39 ms = ...

The script itself is not changed. A few lines run before it, so that its clock can be chosen, so
that the mean and the 99th percentile are printed beside the median that it takes, so that drawing
the random prompts, which the script's hashing time includes, can be taken off, and so that the
cycle collector is kept off what a new scheduler has made, as the peer's engine does after its
start, and as is done here.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELUDE = """
import gc, os, random, runpy, statistics, sys, time
if {clock!r} == "cpu":
    time.perf_counter = time.process_time
median = statistics.median
def described(data):
    times = sorted(data)
    last = statistics.quantiles(times, n=100, method="inclusive")[98] if times[1:] else times[0]
    print(f"steps: mean {{statistics.fmean(times)}} s, p99 {{last}} s", flush=True)
    return median(times)
statistics.median = described
def drawing():
    rng, shared = random.Random(1), [0] * 512
    begin = time.perf_counter()
    prompts = [shared + [rng.randrange(1000, 200_000) for _ in range(512)] for _ in range(64)]
    return (time.perf_counter() - begin) / len(prompts) / 1024
print("drawing", min(drawing() for _ in range(9)), "s/token", flush=True)
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
try:
    from vllm.v1.core.sched.scheduler import Scheduler
except ModuleNotFoundError:
    pass
else:
    make = Scheduler.__init__
    def make_frozen(*args, **kwargs):
        gc.unfreeze()
        make(*args, **kwargs)
        gc.collect()
        gc.freeze()
    Scheduler.__init__ = make_frozen
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

DRAWING = re.compile(r"drawing (?P<seconds>\S+) s/token")
STEPS = re.compile(r"steps: mean (?P<mean>\S+) s, p99 (?P<p99>\S+) s")
LINE = re.compile(
    r"vllm hybrid=(?P<hybrid>True|False) running=(?P<running>\d+): "
    r"hashing (?P<hashing>\S+) ns/token, prefill (?P<prefill>\S+) ms, "
    r"decode step (?P<decode>\S+) ms"
)


class PeerError(Exception):
    """The peer did not run, or said nothing that could be read."""


@dataclass(frozen=True)
class Peer:
    """Where the peer's interpreter, script and model folder are."""

    python: Path
    script: Path
    model: Path

    def run(self, clock: str, tell: Callable[[str], None] = print) -> list[dict[str, Any]]:
        """Run the script once; what it prints goes to `tell` as well. `PeerError` if it fails."""
        command: list[str | Path] = [
            self.python,
            "-c",
            PRELUDE.format(clock=clock),
            self.script,
            self.model,
        ]
        # One thread: schedulers have no use for more, and idle pools would count as our neighbour.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # An import path of ours is none of the peer's.
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise PeerError(f"the peer failed: {done.stderr.strip()[-2000:] or done.stdout}")
        found = read_lines(done.stdout)
        for line in done.stdout.splitlines():
            if LINE.match(line):
                tell(f"  {line}")
        if not found:
            raise PeerError(f"no line of the peer could be read: {done.stdout[-2000:]}")
        return found


def read_lines(text: str) -> list[dict[str, Any]]:
    """Results from the printed lines, one a workload; `groups` is 1 or 6.

    `hashing_ns` leaves out drawing the prompts where that is known; `hashing_printed_ns` does not.
    """
    drawing_ns = 0.0
    steps: dict[str, float] = {}
    found = []
    for line in text.splitlines():
        if match := DRAWING.match(line):
            drawing_ns = float(match["seconds"]) * 1e9
        elif match := STEPS.match(line):
            steps = {f"{name}_ms": float(match[name]) * 1e3 for name in ("mean", "p99")}
        elif match := LINE.match(line):
            running = int(match["running"])
            times = {"median_ms": float(match["decode"]), **steps}
            micro = {name.replace("_ms", "_us"): ms / running * 1e3 for name, ms in times.items()}
            found.append(
                {
                    "running": running,
                    "groups": 6 if match["hybrid"] == "True" else 1,
                    "hashing_ns": float(match["hashing"]) - drawing_ns,
                    "hashing_printed_ns": float(match["hashing"]),
                    "admission_ms": float(match["prefill"]),
                    "decode": times | micro,
                }
            )
            steps = {}
    return found
