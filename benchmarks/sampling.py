"""What does sampling add to a decode step, with the head that finds candidates and with logits?

    python benchmarks/sampling.py [--model M] [--logits]

Milliseconds a step for 8 and 32 requests with 64 prompt tokens, at several sampling parameters: the
time of a run less that of the same run with one token.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from jubako import LLM, SamplingParams

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8, top-p 0.95, top-k 40": {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
}


def seconds(llm: LLM, prompts: list[list[int]], tokens: int, parameters: dict[str, Any]) -> float:
    """Of one run, `tokens` each; random requests have seeds."""
    params = [
        SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            seed=i if parameters["temperature"] else None,
            **parameters,
        )
        for i in range(len(prompts))
    ]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    """Print a row for each set of parameters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="A folder or file (default: the default model).")
    parser.add_argument("--logits", action="store_true", help="Without the candidates' head.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        enable_prefix_caching=False,
        max_num_seqs=32,
        num_threads=args.num_threads,
        log_level="warning",
    )
    if args.logits:
        llm.llm_engine.client.core.executor.worker.model_runner._head_sampler = None
    rng = random.Random(0)
    print(f"{'ms a step':<40}{'8 requests':>12}{'32 requests':>14}")
    for name, parameters in PARAMETERS.items():
        line = f"{name:<40}"
        for requests, width in ((8, 12), (32, 14)):
            prompts = [
                [2] + [rng.randrange(1000, 2000) for _ in range(63)] for _ in range(requests)
            ]
            seconds(llm, prompts, 2, parameters)
            whole = min(seconds(llm, prompts, args.steps + 1, parameters) for _ in range(args.runs))
            first = min(seconds(llm, prompts, 1, parameters) for _ in range(args.runs))
            line += f"{1e3 * (whole - first) / args.steps:>{width}.2f}"
        print(line, flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
