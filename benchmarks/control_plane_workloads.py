"""What do the scheduler and the KV cache alone cost, step by step?

Requests with random prompts, half of each shared, are admitted and then all decode. What a model
runner would answer is made outside the timing. Times are in seconds unless the name says otherwise.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from jubako.config import CacheConfig, JubakoConfig, ModelConfig, SchedulerConfig
from jubako.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    get_hash_fn_by_name,
    get_request_block_hasher,
)
from jubako.sampling_params import SamplingParams
from jubako.scheduler import ModelRunnerOutput, Request, RequestStatus, Scheduler

BLOCK = 16
WINDOW = 512
VOCABULARY = range(1000, 200_000)

INSIDE_BUDGET_US = 1.0
"""Schedule and update, for a running request in a step inside a block."""
BORDER_BUDGET_US = 5.0
"""On top of that, for a request and KV group, each time a block has filled."""
TOLERANCE = 2.0
"""The check fails above this many times a budget."""


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Processor time leaves out what other processes take from this one."""


@dataclass(frozen=True)
class Workload:
    """`groups` is 1 (full attention) or more (one full, the others sliding windows)."""

    running: int
    groups: int = 1
    prompt: int = 1024
    """Tokens, of which `shared` at the front are the same for all."""
    shared: int = 512
    blocks: int = 400_000
    budget: int = 8192
    """Tokens a step."""
    max_model_len: int = 32_768
    log_stats: bool = False
    steps: int = 100
    """Decode steps to measure."""
    clock: str = "wall"
    """See `CLOCKS`."""


def make_scheduler(workload: Workload) -> Scheduler:
    """A scheduler without a model, prefix caching on, everything else at its default."""
    shape: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 256,
        "dtype": "bfloat16",
    }
    groups = [KVCacheGroupSpec(["layer0"], FullAttentionSpec(**shape))]
    groups += [
        KVCacheGroupSpec([f"layer{i}"], SlidingWindowSpec(**shape, sliding_window=WINDOW))
        for i in range(1, workload.groups)
    ]
    return Scheduler(
        JubakoConfig(
            model_config=ModelConfig(max_model_len=workload.max_model_len),
            scheduler_config=SchedulerConfig(
                max_num_seqs=workload.running, max_num_batched_tokens=workload.budget
            ),
            cache_config=CacheConfig(enable_prefix_caching=True),
        ),
        KVCacheConfig(workload.blocks, [], groups),
        log_stats=workload.log_stats,
    )


def draw_prompts(workload: Workload, seed: int = 1) -> Iterator[list[int]]:
    """Random token ids, one prompt after the other."""
    rng = random.Random(seed)
    shared = rng.choices(VOCABULARY, k=workload.shared)
    for _ in range(workload.running):
        yield shared + rng.choices(VOCABULARY, k=workload.prompt - workload.shared)


class Engine:
    """A scheduler, and the answers of a model that always says 7."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.clock = CLOCKS[workload.clock]
        self.scheduler = make_scheduler(workload)
        algorithm = self.scheduler.config.cache_config.prefix_caching_hash_algo
        self.hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name(algorithm))
        self.left: dict[str, int] = {}
        """Prompt tokens that are not computed yet, of the requests that have any."""
        self._made = 0

    def add(self, prompts: Iterable[list[int]]) -> float:
        """Queue a request for each prompt.

        Returns the seconds that making them took, which hashes their prompts; neither drawing the
        prompts nor queueing is in it. Each is made while its prompt is fresh, as in a server.
        """
        params = SamplingParams(max_tokens=self.workload.max_model_len, ignore_eos=True)
        now, seconds = self.clock, 0.0
        requests = []
        for number, prompt in enumerate(prompts, self._made):
            begin = now()
            request = Request(str(number), prompt, params, block_hasher=self.hasher)
            seconds += now() - begin
            requests.append(request)
        self._made += len(requests)
        for request in requests:
            self.scheduler.add_request(request)
            self.left[request.request_id] = request.num_prompt_tokens
        return seconds

    def step(self) -> float:
        """Seconds of one schedule and update."""
        now, left = self.clock, self.left
        begin = now()
        output = self.scheduler.schedule()
        scheduled = now()
        for new in output.scheduled_new_reqs:
            left[new.req_id] -= new.num_computed_tokens
        ids = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for request_id, count in output.num_scheduled_tokens.items():
            if request_id in left:
                left[request_id] -= count
                if left[request_id] > 0:
                    tokens.append([])
                    continue
                del left[request_id]
            tokens.append([7])
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
        )
        executed = now()
        self.scheduler.update_from_output(output, result)
        return (scheduled - begin) + (now() - executed)

    def admit(self) -> list[float]:
        """Step until every prompt is computed; the seconds of each step."""
        steps = []
        while self.left:
            steps.append(self.step())
        return steps

    def end_all(self) -> None:
        """End every request."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.left.clear()

    def fill_cache(self) -> None:
        """Run one prompt after another until every block has been used.

        From then on each block that is handed out must first be forgotten.
        """
        rng = random.Random(0)
        length = min(4096, self.workload.blocks // 4 // self.workload.groups * BLOCK)
        for _ in range(self.workload.blocks * BLOCK // length + 1):
            self.add([rng.choices(VOCABULARY, k=length)])
            self.admit()
            self.end_all()


def summary(steps: Iterable[float], running: int) -> dict[str, float]:
    """Median, mean and 99th percentile, in milliseconds and in microseconds a running request."""
    times = sorted(steps)
    last = statistics.quantiles(times, n=100, method="inclusive")[98] if times[1:] else times[0]
    found = {"median": statistics.median(times), "mean": statistics.fmean(times), "p99": last}
    return {f"{name}_ms": value * 1e3 for name, value in found.items()} | {
        f"{name}_us": value / running * 1e6 for name, value in found.items()
    }


@contextmanager
def start_up_frozen() -> Iterator[None]:
    """Keep the cycle collector off what exists already, as the engine does after its start."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(workload: Workload) -> dict[str, Any]:
    """Hashing (a prompt token), admission (all steps until the last prompt is done), decode."""
    engine = Engine(workload)
    with start_up_frozen():
        hashing = engine.add(draw_prompts(workload))
        admission = engine.admit()
        steps = [engine.step() for _ in range(workload.steps)]
    assert engine.scheduler.get_request_counts() == (workload.running, 0)
    return {
        **asdict(workload),
        "hashing_ns": hashing / workload.running / workload.prompt * 1e9,
        "admission_ms": sum(admission) * 1e3,
        "admission_steps": len(admission),
        "decode": summary(steps, workload.running),
    }


def measure_borders(workload: Workload, periods: int = 8) -> dict[str, Any]:
    """Steps inside a block and steps over its border, told apart.

    All requests are admitted in one step, so that all fill their blocks in the same step. `inside`
    is the median step of a period of one block; `border` is what the period costs beyond as many
    such steps, for a request and group. Both are medians over the periods.
    """
    engine = Engine(replace(workload, budget=workload.running * workload.prompt))
    engine.add(draw_prompts(workload))
    inside, border = [], []
    with start_up_frozen():
        first = engine.admit()
        assert len(first) == 1, f"admission took {len(first)} steps"
        for period in range(periods + 1):
            steps = [engine.step() for _ in range(BLOCK)]
            if period:
                inside.append(statistics.median(steps))
                border.append(sum(steps) - BLOCK * inside[-1])
    return {
        "running": workload.running,
        "groups": workload.groups,
        "inside_us": statistics.median(inside) / workload.running * 1e6,
        "border_us": statistics.median(border) / workload.running / workload.groups * 1e6,
    }


def measure_point(
    workload: Workload, *, full_cache: bool = False, repeats: int = 1
) -> dict[str, Any]:
    """Decode steps alone, over whole blocks and after a first block.

    `full_cache` begins with every block used before.
    """
    engine = Engine(workload)
    if full_cache:
        engine.fill_cache()
    prompts = list(draw_prompts(workload))
    steps: list[float] = []
    for _ in range(repeats):
        engine.add(prompts)
        engine.admit()
        for _ in range(BLOCK):
            engine.step()
        with start_up_frozen():
            steps += [engine.step() for _ in range(workload.steps)]
        assert engine.scheduler.get_request_counts() == (workload.running, 0)
        engine.end_all()
    return {**asdict(workload), **summary(steps, workload.running)}
