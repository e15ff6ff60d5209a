"""How fast is an engine in this process, without HTTP?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jubako.entrypoints.benchmarking.figures import RequestTimes, spread, summarise
from jubako.entrypoints.benchmarking.workloads import Workload
from jubako.errors import ConfigError
from jubako.outputs import RequestOutput
from jubako.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.llm_engine import LLMEngine

_SPREAD_OF = ("seconds", "output_tokens_per_second", "total_tokens_per_second")


def run_once(
    engine: LLMEngine, workload: Workload, prompts: Sequence[list[int]]
) -> tuple[list[RequestTimes], float]:
    """Give the engine all requests at once; when their tokens came, and the seconds it took."""
    times: dict[str, RequestTimes] = {}
    began = time.perf_counter()
    for i, (shape, prompt) in enumerate(zip(workload.shapes, prompts, strict=True)):
        params = SamplingParams(
            temperature=0,
            max_tokens=shape.output_len,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        times[str(i)] = RequestTimes(time.perf_counter(), input_tokens=len(prompt))
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            record = times[output.request_id]
            answers = cast(RequestOutput, output).outputs
            new = sum(len(answer.token_ids) for answer in answers)
            if new:
                record.arrivals.append(now)
                record.output_tokens += new
    return list(times.values()), time.perf_counter() - began


def check_fits(engine: LLMEngine, workload: Workload) -> None:
    """Raise ConfigError if a request is longer than the engine takes."""
    limit = engine.ready.max_model_len
    if workload.longest > limit:
        raise ConfigError(
            f"Workload {workload.name} has a request of {workload.longest} tokens with its answer, "
            f"but max_model_len={limit}; shorten it or raise --max-model-len.",
            "input_len",
        )


def measure(
    engine: LLMEngine, workload: Workload, *, num_warmups: int, num_runs: int
) -> dict[str, Any]:
    """Figures of `num_runs` runs, each with an empty prefix cache: those of the run with the median
    time, and the median and spread of the rates."""
    check_fits(engine, workload)
    prompts = workload.prompts(engine.ready.vocab_size)
    runs = []
    for i in range(num_warmups + num_runs):
        engine.reset_prefix_cache()
        requests, seconds = run_once(engine, workload, prompts)
        if i >= num_warmups:
            runs.append(summarise(requests, seconds))
    middle = sorted(runs, key=lambda run: run["seconds"])[(len(runs) - 1) // 2]
    spreads = {name: spread([run[name] for run in runs]) for name in _SPREAD_OF}
    return {"workload": workload.name, "num_requests": len(prompts)} | middle | {"spread": spreads}
