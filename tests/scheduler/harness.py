"""A scheduler without a model: small configs, a function as the model, and a worker's mirror."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jubako.config import CacheConfig, JubakoConfig, ModelConfig, SchedulerConfig
from jubako.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from jubako.sampling_params import SamplingParams
from jubako.scheduler import (
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)

EOS = 1
VOCAB = 11


def full_spec(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32")


def window_spec(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        sliding_window=window,
    )


def make_scheduler(
    *,
    block_size: int = 4,
    num_blocks: int = 100,
    window: int | None = None,
    max_model_len: int | None = 256,
    caching: bool | None = True,
    watermark: float = 0.0,
    seed: int = 0,
    scheduler_class: type[Scheduler] = Scheduler,
    log_stats: bool = False,
    hooks: dict[str, object] | None = None,
    include_finished_set: bool = False,
    **options: object,
) -> Scheduler:
    """A scheduler over one full-attention group, and a sliding-window group if `window` is given.

    `options` are those of `SchedulerConfig`; fair prefill and overtaking are off unless given.
    """
    values: dict[str, object] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": min(16, int(options.get("max_num_batched_tokens", 16))),  # type: ignore
        "fair_prefill": False,
        "admission_lookahead": 0,
    }
    values |= options
    specs: list[KVCacheSpec] = [full_spec(block_size)]
    if window is not None:
        specs.append(window_spec(block_size, window))
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return scheduler_class(
        JubakoConfig(
            model_config=ModelConfig(max_model_len=max_model_len, seed=seed),
            cache_config=CacheConfig(
                block_size=block_size, enable_prefix_caching=caching, watermark=watermark
            ),
            scheduler_config=SchedulerConfig(**values),  # type: ignore[arg-type]
        ),
        KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups),
        log_stats=log_stats,
        include_finished_set=include_finished_set,
        **(hooks or {}),  # type: ignore[arg-type]
    )


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    max_tokens: int | None = 16,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    eos: int | None = EOS,
    client_index: int = 0,
    **params: object,
) -> Request:
    """A greedy request. A number for `prompt` means that many tokens that no other id shares."""
    if isinstance(prompt, int):
        salt = sum(map(ord, request_id)) * 1000 + 100
        prompt = range(salt, salt + prompt)
    return Request(
        request_id,
        list(prompt),
        SamplingParams(temperature=0, max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        eos_token_id=eos,
        arrival_time=arrival,
        priority=priority,
        client_index=client_index,
    )


# -- the model ----------------------------------------------------------------------------------


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """For each position, a number that stands for all tokens up to it."""
    state = 17
    result = []
    for token in tokens:
        state = (state * 1_000_003 + token * 7919 + 11) % (2**61 - 1)
        result.append(state)
    return result


def next_token(tokens: Sequence[int]) -> int:
    """The model: what follows `tokens`, depending on every one of them."""
    return (prefix_hashes(tokens)[-1] >> 7) % VOCAB


@dataclass
class Answer:
    tokens: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


def answer(request: Request, max_model_len: int) -> Answer:
    """What `request` must be answered, whatever else runs: the model alone, token by token."""
    params = request.sampling_params
    assert params is not None
    tokens = list(request.prompt_token_ids or [])
    output: list[int] = []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if len(output) >= params.min_tokens:
            if token == request.eos_token_id and not params.ignore_eos:
                return Answer(output, FinishReason.STOP, None)
            if token in params.stop_ids:
                return Answer(output, FinishReason.STOP, token)
        if len(tokens) >= max_model_len or len(output) == params.max_tokens:
            return Answer(output, FinishReason.LENGTH, None)


# -- the worker ---------------------------------------------------------------------------------


@dataclass
class MirroredRequest:
    prompt_length: int
    tokens: list[int]
    """Prompt and the outputs that this worker sampled or was told."""
    block_ids: list[list[int]]
    num_computed: int


@dataclass
class WorkerMirror:
    """Applies the records as a worker does, and keeps in each KV slot what was written there.

    Reading a slot checks that it holds the KV of exactly the reader's prefix.
    """

    scheduler: Scheduler
    requests: dict[str, MirroredRequest] = field(default_factory=dict)
    kv: dict[tuple[int, int, int], int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    last_batch: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        self.specs = [group.kv_cache_spec for group in groups]

    def apply(self, step: SchedulerOutput) -> None:
        """Take over what the records say."""
        for request_id in step.finished_req_ids:
            assert request_id not in self.finished, "told twice that it ended"
            self.finished.add(request_id)
            self.requests.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.seen, "new twice"
            assert new.prompt_token_ids is not None
            self.seen.add(new.req_id)
            self.requests[new.req_id] = MirroredRequest(
                len(new.prompt_token_ids),
                list(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = step.scheduled_cached_reqs
        assert cached.new_token_ids == []
        for row, request_id in enumerate(cached.req_ids):
            state = self.requests[request_id]
            new_ids = cached.new_block_ids[row]
            if request_id in cached.resumed_req_ids:
                assert new_ids is not None
                state.block_ids = [list(ids) for ids in new_ids]
                assert request_id in cached.all_token_ids
            else:
                assert state.num_computed == cached.num_computed_tokens[row]
                if new_ids is not None:
                    assert any(new_ids)
                    for table, ids in zip(state.block_ids, new_ids, strict=True):
                        table += ids
            state.num_computed = cached.num_computed_tokens[row]
            if request_id not in cached.resumed_req_ids:
                sat_out = request_id not in self.last_batch
                assert (request_id in cached.all_token_ids) == sat_out
            if request_id in cached.all_token_ids:
                told = cached.all_token_ids[request_id]
                common = min(len(told), len(state.tokens))
                assert told[:common] == state.tokens[:common]
                # Fewer than this worker sampled only if what was in flight has been dropped.
                assert common == len(state.tokens) or request_id in cached.resumed_req_ids
                state.tokens = list(told)
            assert cached.num_output_tokens[row] >= len(state.tokens) - state.prompt_length
        self.last_batch = set(step.num_scheduled_tokens)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step, checking every KV slot that is read."""
        self.apply(step)
        chunks: dict[str, list[int]] = {}
        for request_id, count in step.num_scheduled_tokens.items():
            state = self.requests[request_id]
            drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
            tokens = (state.tokens + drafts)[: state.num_computed + count]
            assert len(tokens) == state.num_computed + count, "told to compute unknown tokens"
            chunks[request_id] = tokens
            self._check_table(request_id, state, len(tokens))
            self._write(state, tokens)
        sampled: dict[str, list[int]] = {}
        for request_id, tokens in chunks.items():
            state = self.requests[request_id]
            self._check_reads(state, tokens)
            sampled[request_id] = self._sample(state, tokens)
        # Rows need not be in the scheduler's order.
        req_ids = list(reversed(chunks))
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(req_ids)},
            sampled_token_ids=[sampled[request_id] for request_id in req_ids],
        )

    def _slot(self, state: MirroredRequest, group: int, position: int) -> tuple[int, int, int]:
        size = self.specs[group].block_size
        return group, state.block_ids[group][position // size], position % size

    def _check_table(self, request_id: str, state: MirroredRequest, length: int) -> None:
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        for group, (mine, table) in enumerate(zip(state.block_ids, tables, strict=True)):
            assert len(mine) == len(table)
            # A table entry that no later token reads may have turned into null since.
            assert all(b in (a, 0) for a, b in zip(mine, table, strict=True))
            assert len(mine) * self.specs[group].block_size >= length

    def _write(self, state: MirroredRequest, tokens: list[int]) -> None:
        hashes = prefix_hashes(tokens)
        for group in range(len(self.specs)):
            for position in range(state.num_computed, len(tokens)):
                slot = self._slot(state, group, position)
                if slot[1] == 0:
                    # A chunk longer than a window may begin before it.
                    assert isinstance(self.specs[group], SlidingWindowSpec)
                    continue
                self.kv[slot] = hashes[position]

    def _check_reads(self, state: MirroredRequest, tokens: list[int]) -> None:
        hashes = prefix_hashes(tokens)
        for group, spec in enumerate(self.specs):
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(0, state.num_computed - spec.sliding_window + 1)
            for position in range(first, len(tokens)):
                assert self.kv.get(self._slot(state, group, position)) == hashes[position]

    def _sample(self, state: MirroredRequest, tokens: list[int]) -> list[int]:
        known = len(state.tokens)
        state.num_computed = len(tokens)
        if len(tokens) < known:
            return []
        accepted: list[int] = []
        for position in range(known, len(tokens) + 1):
            accepted.append(next_token(tokens[:position]))
            if position < len(tokens) and tokens[position] != accepted[-1]:
                break
        state.tokens += accepted
        state.num_computed = len(state.tokens) - 1
        return accepted


# -- driving ------------------------------------------------------------------------------------


@dataclass
class Driver:
    """Runs steps, checks the invariants after every call, and keeps what each request got."""

    scheduler: Scheduler
    mirror: WorkerMirror = field(init=False)
    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, EngineCoreOutput] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    in_records: set[str] = field(default_factory=set)
    depth: int = 1
    """Steps in flight; more than one only for a scheduler that runs ahead."""
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    flushed: set[str] = field(default_factory=set)
    overtaken: dict[str, int] = field(default_factory=dict)
    """How often later requests were admitted before each; bounded by `admission_lookahead`."""

    def __post_init__(self) -> None:
        self.mirror = WorkerMirror(self.scheduler)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
            self.scheduler.add_request(request)
            check_invariants(self.scheduler)

    def abort(self, *request_ids: str) -> None:
        live = [i for i in request_ids if i in self.scheduler.requests]
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.aborted.update(live)
        check_invariants(self.scheduler)

    def schedule(self) -> SchedulerOutput:
        before = {i: r.num_computed_tokens for i, r in self.scheduler.requests.items()}
        outputs_before = {i: r.num_output_tokens for i, r in self.scheduler.requests.items()}
        queue = [r for r in self.scheduler.waiting if r.awaits_admission and not r.num_stale_tokens]
        step = self.scheduler.schedule()
        self._check_order(queue, step)
        check_step(self.scheduler, step, before)
        for request_id, count in outputs_before.items():
            if request_id in self.scheduler.requests:
                assert self.scheduler.requests[request_id].num_output_tokens == count
        assert not step.finished_req_ids & self.flushed
        assert not self.flushed & set(step.num_scheduled_tokens)
        self.flushed |= step.finished_req_ids
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.in_records
            self.in_records.add(new.req_id)
        check_invariants(self.scheduler)
        return step

    def _check_order(self, queue: list[Request], step: SchedulerOutput) -> None:
        """Admission follows the queue; overtaking is bounded."""
        admitted = {data.req_id for data in step.scheduled_new_reqs}
        admitted |= step.scheduled_cached_reqs.resumed_req_ids
        waiting = set(self.scheduler.waiting)
        for position, request in enumerate(queue):
            if request in waiting:
                behind = [r for r in queue[position + 1 :] if r.request_id in admitted]
                count = self.overtaken.get(request.request_id, 0) + len(behind)
                self.overtaken[request.request_id] = count
                assert count <= self.scheduler.admission_lookahead

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        messages = self.scheduler.update_from_output(step, result)
        check_invariants(self.scheduler)
        produced = [output for message in messages.values() for output in message.outputs]
        for output in produced:
            request_id = output.request_id
            assert request_id not in self.ended, "an output after the last"
            assert request_id not in self.aborted, "an output after an abort"
            self.outputs[request_id] += output.new_token_ids
            if output.finished:
                self.ended[request_id] = output
        for request_id in step.num_scheduled_tokens if self.depth == 1 else ():
            request = self.scheduler.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                assert request.is_prefill_chunk or (
                    request.num_computed_tokens == request.num_tokens - 1
                )
        return produced

    def step(self) -> SchedulerOutput:
        """Schedule and execute a step; take the oldest result if enough are under way."""
        step = self.schedule()
        self.in_flight.append((step, self.mirror.execute(step)))
        if len(self.in_flight) >= self.depth:
            self.take_result()
        return step

    def take_result(self) -> list[EngineCoreOutput]:
        """Let the oldest step in flight come back."""
        return self.update(*self.in_flight.popleft())

    def run(self, steps: int | None = None) -> list[dict[str, int]]:
        """Step until all requests have ended and the workers know; tokens of each step."""
        scheduled: list[dict[str, int]] = []
        # Even one token a step, and all of it computed several times over, takes no longer.
        limit = 100 + 10 * self.scheduler.max_model_len * len(self.scheduler.requests)
        while self.scheduler.has_requests() if steps is None else len(scheduled) < steps:
            scheduled.append(dict(self.step().num_scheduled_tokens))
            assert len(scheduled) < limit, "no progress"
        while self.in_flight and steps is None:
            self.take_result()
        return scheduled

    def check_answers(self) -> None:
        """Everybody that was not aborted got the model's own answer, and all KV is free."""
        for request_id, request in self.requests.items():
            expected = answer(request, self.scheduler.max_model_len)
            got = self.outputs[request_id]
            if request_id in self.aborted:
                assert got == expected.tokens[: len(got)]
                continue
            end = self.ended[request_id]
            assert got == expected.tokens
            assert (end.finish_reason, end.stop_reason) == (
                expected.finish_reason,
                expected.stop_reason,
            )
        check_all_free(self.scheduler)
        assert self.flushed == set(self.requests)


# -- invariants ---------------------------------------------------------------------------------


def check_invariants(scheduler: Scheduler) -> None:
    """What must hold after every public call."""
    running, waiting = scheduler.running, list(scheduler.waiting)
    ids = [r.request_id for r in running] + [r.request_id for r in waiting]
    assert len(ids) == len(set(ids))
    assert set(ids) == set(scheduler.requests)
    assert len(scheduler.waiting) == len(waiting)
    assert len(running) <= scheduler.max_num_running_reqs
    assert all(r.status is RequestStatus.RUNNING for r in running)
    assert all(r.status <= RequestStatus.PREEMPTED for r in waiting)
    assert all(r.status is not RequestStatus.RUNNING for r in waiting)
    prefilling = {r.request_id for r in running if r.is_prefill_chunk}
    assert set(scheduler._prefilling) == prefilling
    for request in scheduler.requests.values():
        known = request.num_tokens + request.num_output_placeholders
        assert request.num_tokens == len(request.all_token_ids)
        assert request.num_computed_tokens <= scheduler.max_model_len
        if not scheduler.prev_step_scheduled_req_ids:
            assert request.num_computed_tokens <= known
        if request.status is RequestStatus.PREEMPTED:
            assert request.num_computed_tokens == 0
            assert request.spec_token_ids == []
        if request.status in (RequestStatus.PREEMPTED, RequestStatus.WAITING):
            tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            assert not any(tables)
        if scheduler.block_hasher is not None:
            assert len(request.block_hashes) == request.num_tokens // scheduler.hash_block_size
    if not scheduler.requests and not scheduler.finished_req_ids:
        check_all_free(scheduler)


def check_step(scheduler: Scheduler, step: SchedulerOutput, before: dict[str, int]) -> None:
    """What must hold for the records of one step."""
    counts = step.num_scheduled_tokens
    assert all(count >= 1 for count in counts.values())
    assert sum(counts.values()) == step.total_num_scheduled_tokens
    assert step.total_num_scheduled_tokens <= scheduler.max_num_scheduled_tokens
    new = [data.req_id for data in step.scheduled_new_reqs]
    cached = step.scheduled_cached_reqs.req_ids
    assert len(new) + len(cached) == len(counts)
    assert set(new) | set(cached) == set(counts)
    if step.preempted_req_ids:
        assert not new
        assert not step.scheduled_cached_reqs.resumed_req_ids
        assert not step.preempted_req_ids & set(counts)
    assert not step.finished_req_ids & set(counts)
    assert set(step.scheduled_spec_decode_tokens) <= set(counts)
    assert all(step.scheduled_spec_decode_tokens.values())
    assert set(step.scheduled_encoder_inputs) <= set(counts)
    computed = {data.req_id: data.num_computed_tokens for data in step.scheduled_new_reqs}
    computed |= dict(zip(cached, step.scheduled_cached_reqs.num_computed_tokens, strict=True))
    for request_id, count in counts.items():
        request = scheduler.requests[request_id]
        assert request.num_computed_tokens == computed[request_id] + count
        resumed = request_id in step.scheduled_cached_reqs.resumed_req_ids
        if request_id not in new and not resumed:
            assert computed[request_id] == before[request_id]
        drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
        assert len(drafts) <= count - 1
        assert request.num_computed_tokens <= (
            request.num_tokens + len(drafts) + request.num_output_placeholders
        )
    for data in step.scheduled_new_reqs:
        assert data.seed is not None


def check_all_free(scheduler: Scheduler) -> None:
    """No trace of any request is left but what the prefix cache keeps."""
    manager = scheduler.kv_cache_manager
    assert manager.usage == 0
    assert manager.block_pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1
    for group in manager.coordinator.single_type_managers:
        assert not group.req_to_blocks
        assert not group.num_cached_block
    assert not scheduler._prefilling
    assert not scheduler._failed


def scheduled(step: SchedulerOutput) -> dict[str, int]:
    return dict(step.num_scheduled_tokens)


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def finish(scheduler: Scheduler, *request_ids: str) -> None:
    scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)


def result_for(step: SchedulerOutput, **tokens: list[int]) -> ModelRunnerOutput:
    """A result in which the named requests sampled `tokens`, and the others nothing."""
    req_ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={request_id: row for row, request_id in enumerate(req_ids)},
        sampled_token_ids=[tokens.get(request_id, []) for request_id in req_ids],
    )
