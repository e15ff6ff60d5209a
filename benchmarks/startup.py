"""How long until `jubako generate` prints its first token, and where does the time go?

    python benchmarks/startup.py [--runs N] [--model M]

The first run warms the file cache and is not counted. The parts are measured one by one, each in a
fresh process; in the real start the tokeniser and the engine core load side by side.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PARTS = {
    "interpreter": "pass",
    "+ command line": "import jubako.entrypoints.cli",
    "+ front end": "import jubako.frontend.llm_engine",
    "PyTorch": "import torch",
    "tokeniser": (
        "from jubako.checkpoint.info import open_checkpoint\n"
        "from jubako.frontend.tokenizer import load_tokenizer\n"
        "load_tokenizer(open_checkpoint({model!r}))"
    ),
}

CORE = """
import time
start = time.perf_counter()
import torch
print("core: import PyTorch", time.perf_counter() - start)
from jubako import LLM, SamplingParams
start = time.perf_counter()
llm = LLM(model={model!r})
total = time.perf_counter() - start
for stage, seconds in llm.llm_engine.ready.startup_seconds.items():
    print("core:", stage, seconds)
print("LLM() with everything imported on the way", total)
params = SamplingParams(temperature=0, max_tokens=1)
for name in ("first", "second"):
    start = time.perf_counter()
    llm.generate("The capital of France is", params, use_tqdm=False)
    print(name, "token of a short prompt", time.perf_counter() - start)
llm.shutdown()
"""


def seconds_of(code: str) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def first_token(model: str | None) -> float:
    """Seconds from starting the process to the first character of the answer."""
    command = [sys.executable, "-m", "jubako.entrypoints.cli", "generate"]
    command += ["The capital of France is", "--max-tokens", "4", "--temperature", "0"]
    if model:
        command += ["--model", model]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "no answer"
        elapsed = time.perf_counter() - begin
        process.stdout.read()
    return elapsed


def main() -> None:
    """Print the total, then the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model")
    args = parser.parse_args()
    first_token(args.model)
    times = [first_token(args.model) for _ in range(args.runs)]
    print(f"process start to first token: median {statistics.median(times):.2f} s", end=", ")
    print(f"{min(times):.2f} to {max(times):.2f} s in {args.runs} runs")
    print("\nparts, each in a process of its own (interpreter included):")
    for name, code in PARTS.items():
        median = statistics.median(seconds_of(code.format(model=args.model)) for _ in range(3))
        print(f"  {name:<22} {median:6.2f} s")
    output = subprocess.run(
        [sys.executable, "-c", CORE.format(model=args.model)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for line in output.splitlines():
        name, seconds = line.rsplit(" ", 1)
        print(f"  {name:<42} {float(seconds):6.2f} s")


if __name__ == "__main__":
    main()
