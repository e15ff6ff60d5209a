"""How much longer does a step take when grammars say which tokens may come?

    python benchmarks/structured_output.py [--model MODEL] [--batch 1 8 32] [--tokens 64]

For each batch size the same prompts are continued by the same number of tokens, freely and held to
a form, greedily and sampled. What is printed is the median time of a decoding step, of several
runs that take turns, and how much longer it is with the form. `json` is a schema of a few strings
and numbers; `text` is a string of any characters, whose masks allow nearly the whole vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from jubako import LLM, SamplingParams
from jubako.sampling_params import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "biography": {"type": "string"},
    },
    "required": ["name", "age", "biography"],
}
FORMS: dict[str, StructuredOutputsParams | None] = {
    "free": None,
    "json": StructuredOutputsParams(json={"type": "array", "items": PERSON, "minItems": 50}),
    "text": StructuredOutputsParams(json={"type": "string", "minLength": 4000}),
}


def step_seconds(llm: LLM, batch: int, tokens: int, params: dict[str, Any]) -> list[float]:
    """Times of the steps in which all `batch` requests decode."""
    engine = llm.llm_engine
    for i in range(batch):
        engine.add_request(
            f"{time.monotonic_ns()}-{i}",
            f"Person {i} of the list, as JSON:",
            SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **params),
        )
    seconds: list[float] = []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    # The first steps compile, prefill and fill the batch, the last ones empty it.
    return seconds[len(seconds) // 4 : -4]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=1024, enable_prefix_caching=False)
    print(f"{'batch':>5} {'sampling':>9} {'form':>5} {'ms a step':>10} {'more':>7}")
    for temperature in (0.0, 1.0):
        for batch in args.batch:
            found: dict[str, list[float]] = {name: [] for name in FORMS}
            for _ in range(args.rounds):
                for name, form in FORMS.items():
                    params = {"temperature": temperature, "structured_outputs": form}
                    found[name] += step_seconds(llm, batch, args.tokens, params)
            free = statistics.median(found["free"])
            for name, seconds in found.items():
                median = statistics.median(seconds)
                print(
                    f"{batch:5} {'sampled' if temperature else 'greedy':>9} {name:>5} "
                    f"{median * 1e3:10.2f} {median / free - 1:7.1%}"
                )
    llm.shutdown()


if __name__ == "__main__":
    main()
