"""A scheduler for tests: plans random steps, hands out blocks, and gathers what comes back.

It keeps to the scheduler's contract (requests in full once, differences afterwards, all blocks on
resumption) and stresses the worker: chunks of any size, requests that sit out, preemption at any
point, window blocks that are freed and reused, prefixes shared, ids reused in the step that ends
their first use.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jubako.sampling_params import SamplingParams
from jubako.scheduler.model_output import LogprobsLists, ModelRunnerOutput
from jubako.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from jubako.worker.model_runner import ModelRunner


@dataclass(eq=False)
class Job:
    """A request and what it has got so far."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    output: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)
    prompt_logprobs: LogprobsLists | None = None
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    known: bool = False
    """The worker has its state."""
    preempted: bool = False
    failure: str | None = None
    """Why it has ended without a token."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return self.failure is not None or len(self.output) >= self.max_tokens

    def result(self) -> tuple:
        scored = self.prompt_logprobs
        prompt = (
            None
            if scored is None
            else (
                scored.logprob_token_ids.tolist(),
                np.round(scored.logprobs, 5).tolist(),
                scored.sampled_token_ranks.tolist(),
            )
        )
        return self.output, self.logprobs, prompt, self.failure


class Driver:
    """Plans steps for `runner`, whose groups are (block size, window, layers)."""

    def __init__(
        self,
        runner: ModelRunner,
        groups: Sequence[tuple[int, int | None, int]],
        num_blocks: int = 200,
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.groups = groups
        self.random = random.Random(seed)
        self.free = list(range(1, num_blocks))
        self.random.shuffle(self.free)
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.finished: set[str] = set()
        self.live: list[Job] = []
        self.done: list[Job] = []

    # -- blocks -------------------------------------------------------------------------------

    def _allocate(self) -> int:
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        if block == 0:
            return
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free.append(block)

    def _grow(self, job: Job, length: int) -> tuple[list[int], ...] | None:
        new: list[list[int]] = []
        for group, (block_size, _, _) in enumerate(self.groups):
            missing = -(-length // block_size) - len(job.blocks[group])
            new.append([self._allocate() for _ in range(missing)])
            job.blocks[group] += new[-1]
        return tuple(new) if any(new) else None

    def _free_outside_windows(self, job: Job) -> None:
        """The worker is not told: it must not look there."""
        for group, (block_size, window, _) in enumerate(self.groups):
            if window is not None:
                for i in range(max(0, job.computed - window + 1) // block_size):
                    self._release(job.blocks[group][i])
                    job.blocks[group][i] = 0

    def _free_all(self, job: Job) -> None:
        for blocks in job.blocks:
            for block in blocks:
                self._release(block)
        job.blocks = []

    def _share_prefix(self, job: Job) -> None:
        """Start from another job's blocks where the prompts begin alike."""
        if job.params.prompt_logprobs is not None:
            return
        whole = max(size for size, _, _ in self.groups)
        for other in self.live:
            if other is job or not other.blocks:
                continue
            same = 0
            limit = min(other.computed, len(job.tokens) - 1)
            while same < limit and other.tokens[same] == job.tokens[same]:
                same += 1
            same -= same % whole
            needed = all(
                all(
                    other.blocks[g][i]
                    for i in range(0 if w is None else max(0, same - w + 1) // b, same // b)
                )
                for g, (b, w, _) in enumerate(self.groups)
            )
            if same and needed:
                for group, (size, _, _) in enumerate(self.groups):
                    shared = other.blocks[group][: same // size]
                    for block in shared:
                        self.refs[block] += 1
                    job.blocks[group] = list(shared)
                job.computed = same
                return

    # -- steps --------------------------------------------------------------------------------

    def step(
        self, arrivals: Sequence[Job] = (), chunks: dict[str, int] | None = None, calm: bool = False
    ) -> SchedulerOutput:
        """Plan and run one step. `chunks` fixes who computes how much; `calm` never preempts."""
        self.live += arrivals
        rng = self.random
        budget = self.runner.max_num_tokens
        new, cached = [], CachedRequestData()
        scheduled: dict[str, int] = {}
        order = list(self.live)
        if not calm:
            rng.shuffle(order)
        for job in order:
            if not calm and job.known and not job.preempted and rng.random() < 0.08:
                self._free_all(job)
                job.preempted, job.computed = True, 0
            waits = not calm and rng.random() < 0.2
            if waits or len(scheduled) == self.runner.max_num_reqs or not budget:
                continue
            enters = not job.known or job.preempted
            if enters:
                job.blocks = [[] for _ in self.groups]
                if not calm:
                    self._share_prefix(job)
            left = len(job.tokens) - job.computed
            count = min(left, budget)
            if chunks and job.req_id in chunks:
                count = min(count, chunks[job.req_id])
            elif not calm and rng.random() < 0.6:
                count = rng.randint(1, count)
            blocks = self._grow(job, job.computed + count)
            scheduled[job.req_id] = count
            budget -= count
            if not job.known:
                new.append(
                    NewRequestData(
                        req_id=job.req_id,
                        prompt_token_ids=job.prompt,
                        sampling_params=job.params,
                        block_ids=tuple(job.blocks),
                        num_computed_tokens=job.computed,
                        seed=job.seed,
                    )
                )
                job.known = True
            else:
                cached.req_ids.append(job.req_id)
                cached.num_computed_tokens.append(job.computed)
                cached.num_output_tokens.append(len(job.output))
                cached.new_block_ids.append(tuple(job.blocks) if job.preempted else blocks)
                if job.preempted:
                    cached.resumed_req_ids.add(job.req_id)
                job.preempted = False
        plan = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=self.finished,
        )
        self.finished = set()
        output = self.runner.execute_model(plan)
        if scheduled:
            assert output is None
            output = self.runner.sample_tokens(None)
        assert output is not None
        self._update(scheduled, output)
        return plan

    def _update(self, scheduled: dict[str, int], output: ModelRunnerOutput) -> None:
        assert sorted(output.req_ids) == sorted(scheduled)
        assert output.req_id_to_index == {r: i for i, r in enumerate(output.req_ids)}
        jobs = {job.req_id: job for job in self.live}
        for row, req_id in enumerate(output.req_ids):
            job = jobs[req_id]
            job.computed += scheduled[req_id]
            sampled = output.sampled_token_ids[row]
            job.failure = (output.failures or {}).get(req_id)
            assert len(sampled) == (job.computed == len(job.tokens) and job.failure is None)
            if sampled and job.params.logprobs is not None:
                part = output.logprobs.slice_request(row, len(sampled))
                assert part.logprob_token_ids.shape == (1, job.params.logprobs + 1)
                assert part.logprob_token_ids[0, 0] == sampled[0]
                job.logprobs.append(
                    (
                        part.logprob_token_ids[0].tolist(),
                        np.round(part.logprobs[0], 5).tolist(),
                        int(part.sampled_token_ranks[0]),
                    )
                )
            if req_id in output.prompt_logprobs_dict:
                assert job.prompt_logprobs is None, "prompt logprobs were delivered twice"
                assert job.computed >= len(job.prompt)
                job.prompt_logprobs = output.prompt_logprobs_dict[req_id]
            job.output += sampled
            if job.done:
                self._free_all(job)
                self.live.remove(job)
                self.done.append(job)
                self.finished.add(req_id)
            else:
                self._free_outside_windows(job)

    def run_alone(self, job: Job) -> Job:
        """Run one job by itself, its whole prompt in one step, and end with an empty batch."""
        alone = Job(job.req_id, job.prompt, job.params, job.seed, job.max_tokens)
        self.step([alone], calm=True)
        while not alone.done:
            self.step(calm=True)
        self.step()
        return alone
