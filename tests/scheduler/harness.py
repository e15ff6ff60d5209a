"""A scheduler without a model: small configs, a fake model behind it, and a driver that checks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jubako.config import (
    CacheConfig,
    JubakoConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
)
from jubako.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
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
from tests.scheduler import invariants
from tests.scheduler.fake_model import (
    EOS,
    VOCAB,
    Answer,
    answer,
    next_token,
    prefix_hashes,
)
from tests.scheduler.fakes import FakeGrammars, FakeKVConnector
from tests.scheduler.invariants import History
from tests.scheduler.mirror import Forward, WorkerMirror

__all__ = [
    "EOS",
    "VOCAB",
    "Answer",
    "Driver",
    "WorkerMirror",
    "answer",
    "check_all_free",
    "check_invariants",
    "check_step",
    "finish",
    "full_spec",
    "ids",
    "make_request",
    "make_scheduler",
    "next_token",
    "prefix_hashes",
    "result_for",
    "scheduled",
    "window_spec",
]


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
    specs: Sequence[KVCacheSpec] | None = None,
    max_model_len: int | None = 256,
    caching: bool | None = True,
    watermark: float = 0.0,
    seed: int = 0,
    scheduler_class: type[Scheduler] = Scheduler,
    log_stats: bool = False,
    hooks: dict[str, object] | None = None,
    include_finished_set: bool = False,
    kv_load_failure_policy: str = "recompute",
    **options: object,
) -> Scheduler:
    """A scheduler over one full-attention group, and a sliding-window group if `window` is given.

    `specs` are groups of any kind instead. `options` are those of `SchedulerConfig`; fair prefill
    and overtaking are off unless given.
    """
    values: dict[str, object] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": min(16, int(options.get("max_num_batched_tokens", 16))),  # type: ignore
        "fair_prefill": False,
        "admission_lookahead": 0,
    }
    values |= options
    if specs is None:
        specs = [full_spec(block_size)]
        if window is not None:
            specs.append(window_spec(block_size, window))
    mamba = [spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)]
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return scheduler_class(
        JubakoConfig(
            model_config=ModelConfig(max_model_len=max_model_len, seed=seed),
            cache_config=CacheConfig(
                block_size=block_size,
                enable_prefix_caching=caching,
                watermark=watermark,
                mamba_cache_mode=mamba[0] if mamba else "none",  # type: ignore[arg-type]
            ),
            scheduler_config=SchedulerConfig(**values),  # type: ignore[arg-type]
            kv_transfer_config=KVTransferConfig(
                kv_load_failure_policy=kv_load_failure_policy,  # type: ignore[arg-type]
            ),
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


# -- driving ------------------------------------------------------------------------------------


@dataclass
class Driver:
    """Runs steps, checks the invariants after every call, and keeps what each request got."""

    scheduler: Scheduler
    mirror: WorkerMirror = field(init=False)
    requests: dict[str, Request] = field(default_factory=dict)
    history: History = field(default_factory=History)
    depth: int = 1
    """Steps in flight; more than one only for a scheduler that runs ahead."""
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    evicted: bool = False
    """Whether blocks in use may have been made unfindable, so that tables have gaps of hashes."""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    pieces: dict[str, list[list[int] | None]] = field(default_factory=dict)
    """Of each session what came after its first prompt."""
    expected_errors: set[str] | None = None
    """If given, who may end with an error."""
    last_step: SchedulerOutput = field(default_factory=SchedulerOutput)
    steps_under_way: int = 0
    steps_without_token: int = 0
    idle: dict[str, int] = field(default_factory=dict)
    check_blocks: bool = False
    """Whether the whole pool is gone through after every call."""

    def __post_init__(self) -> None:
        self.mirror = WorkerMirror(self.scheduler)

    @property
    def outputs(self) -> dict[str, list[int]]:
        return self.history.outputs

    @property
    def ended(self) -> dict[str, EngineCoreOutput]:
        return self.history.ended

    @property
    def aborted(self) -> set[str]:
        return self.history.aborted

    @property
    def flushed(self) -> set[str]:
        return self.history.flushed

    # -- calls --------------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
            self.prompts[request.request_id] = list(request.prompt_token_ids or ())
            self.scheduler.add_request(request)
            self.check()

    def add_piece(self, session: Request, length: int | None) -> None:
        """The next piece of a session: that many tokens, or None for its end."""
        pieces = self.pieces.setdefault(session.request_id, [])
        if pieces and pieces[-1] is None:
            return
        tokens = None if length is None else [31 * len(pieces) + i for i in range(length)]
        known = session.num_tokens + sum(len(piece) for piece in pieces if piece)
        if tokens and known + len(tokens) >= self.scheduler.max_model_len:
            return
        pieces.append(tokens)
        if self.expected_errors is not None:
            # The answers to come may leave no room for it.
            self.expected_errors.add(session.request_id)
        piece = Request(
            session.request_id,
            tokens or [0],
            session.sampling_params,
            eos_token_id=session.eos_token_id,
            arrival_time=session.arrival_time,
            priority=session.priority,
            lora_request=session.lora_request,
            cache_salt=session.cache_salt,
            resumable=tokens is not None,
        )
        self.scheduler.add_request(piece)
        self.check()

    def abort(self, *request_ids: str) -> None:
        live = [i for i in request_ids if i in self.scheduler.requests]
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.aborted.update(live)
        self.check()

    def schedule(self) -> SchedulerOutput:
        scheduler = self.scheduler
        before = {i: r.num_computed_tokens for i, r in scheduler.requests.items()}
        outputs_before = {i: r.num_output_tokens for i, r in scheduler.requests.items()}
        given = {i: list(r.spec_token_ids) for i, r in scheduler.requests.items()}
        queue = [r for r in scheduler.waiting if self._could_be_admitted(r)]
        stays = [r for r in scheduler.waiting if r.awaits_admission]
        references = invariants.encoder_references(scheduler)
        running = list(scheduler.running)
        step = self.last_step = scheduler.schedule()
        self.steps_under_way += 1
        check_step(scheduler, step, before)
        invariants.invariant_5_of_victims(scheduler, step, running)
        invariants.invariant_8(scheduler, step, given)
        invariants.invariant_14_of_the_unscheduled(scheduler, step, references)
        history = self.history
        history.invariant_3(scheduler, step)
        history.invariant_9(step)
        history.invariant_13(scheduler, queue, step)
        if scheduler.policy == "fcfs":
            history.invariant_13_order(scheduler, stays)
        for request_id, count in outputs_before.items():
            if request_id in scheduler.requests:
                assert scheduler.requests[request_id].num_output_tokens == count
        if step.preempted_req_ids:
            # What a victim's step was to write has been made unfindable.
            self.evicted = True
        self._watch_service(step)
        self.check()
        return step

    def _could_be_admitted(self, request: Request) -> bool:
        """Whether `request` waits for nothing but room, so that nobody behind it goes first."""
        connector = self.scheduler.connector
        if isinstance(connector, FakeKVConnector) and request.request_id in connector.answers:
            return False
        return request.awaits_admission and not request.num_stale_tokens

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        messages = self.scheduler.update_from_output(step, result)
        self.steps_under_way -= 1
        produced = [output for message in messages.values() for output in message.outputs]
        for client_index, message in messages.items():
            for output in message.outputs:
                assert self.requests[output.request_id].client_index == client_index
        for output in produced:
            self.history.invariant_10(output, self.requests[output.request_id].resumable)
            if output.finish_reason is FinishReason.ERROR and self.expected_errors is not None:
                assert output.request_id in self.expected_errors, output.error
        self.check()
        if self.depth == 1:
            invariants.invariant_8_after_update(self.scheduler, step)
        self.steps_without_token += 1
        if produced or not self.scheduler.requests:
            self.steps_without_token = 0
        return produced

    def sample(self, step: SchedulerOutput, forward: Forward) -> None:
        """Choose the tokens of the newest step; its result is under way then."""
        if step.pending_structured_output_tokens:
            # The masks need tokens that earlier steps bring.
            while self.in_flight:
                self.take_result()
        grammar = self.scheduler.get_grammar_bitmask(step) if self._obeys_grammars else None
        self.in_flight.append((step, self.mirror.sample(forward, grammar)))

    @property
    def _obeys_grammars(self) -> bool:
        return isinstance(self.scheduler.structured_output_manager, FakeGrammars)

    def step(self) -> SchedulerOutput:
        """Schedule and execute a step; take the oldest result if enough are under way."""
        step = self.schedule()
        if isinstance(self.mirror, WorkerMirror):
            self.sample(step, self.mirror.forward(step))
        else:
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

    # -- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every call."""
        check_invariants(self.scheduler)
        invariants.invariant_4_between_steps(self.scheduler, self.steps_under_way)
        if self.check_blocks:
            invariants.blocks_are_owned(self.scheduler, self.blocks_in_transfer(), self.evicted)

    def blocks_in_transfer(self) -> list[tuple[list[int], ...]]:
        """Tables of ended requests that a connector still reads or writes."""
        connector: Any = self.scheduler.connector
        if not isinstance(connector, FakeKVConnector):
            return []
        held = connector.loading | connector.sending
        return [tables for i, tables in held.items() if i not in self.scheduler.requests]

    def _watch_service(self, step: SchedulerOutput) -> None:
        for request in self.scheduler.running:
            request_id = request.request_id
            served = request_id in step.num_scheduled_tokens or request.num_output_placeholders
            self.idle[request_id] = 0 if served else self.idle.get(request_id, 0) + 1

    def invariant_16(self, patience: int) -> None:
        """Running requests are served and somebody gains a token within `patience` steps."""
        assert self.steps_without_token < patience, "nobody gains a token"
        for request in self.scheduler.running:
            assert self.idle.get(request.request_id, 0) < patience, f"{request} starves"

    def check_answers(self) -> None:
        """Everybody that was not aborted got the model's own answer, and all KV is free."""
        for request_id, request in self.requests.items():
            if request.resumable:
                self._check_session(request)
                continue
            alone = answer(request, self.scheduler.max_model_len, masked=self._obeys_grammars)
            self.history.invariant_11(request, self.scheduler.max_model_len)
            self.history.invariant_12(request, alone)
            assert request_id in self.aborted or request_id in self.ended
        check_all_free(self.scheduler)
        assert self.flushed == set(self.requests)

    def _check_session(self, session: Request) -> None:
        """Each turn was answered as if its whole text were one prompt."""
        text, expected = list(self.prompts[session.request_id]), []
        limit = self.scheduler.max_model_len
        for piece in [[], *self.pieces.get(session.request_id, [])]:
            if piece is None or len(text) + len(piece) >= limit:
                break
            text += piece
            tokens = answer(session, limit, prompt=text).tokens
            expected += tokens
            text += tokens[:-1]
        got = self.outputs[session.request_id]
        end = self.ended.get(session.request_id)
        failed = end is not None and end.finish_reason is FinishReason.ERROR
        whole = not failed and session.request_id not in self.aborted
        assert got == (expected if whole else expected[: len(got)])


def check_invariants(scheduler: Scheduler) -> None:
    """What must hold of a scheduler after every public call."""
    invariants.invariant_1(scheduler)
    invariants.invariant_5(scheduler)
    invariants.invariant_14(scheduler)
    invariants.hashes_name_all_full_blocks(scheduler)
    assert len(scheduler.running) <= scheduler.max_num_running_reqs
    if not scheduler.requests and not scheduler.has_requests() and not scheduler.connector:
        check_all_free(scheduler)


def check_step(scheduler: Scheduler, step: SchedulerOutput, before: dict[str, int]) -> None:
    """What must hold for the records of one step; `before` are the computed tokens before it."""
    invariants.invariant_2(scheduler, step)
    invariants.invariant_3(scheduler, step)
    invariants.invariant_4(scheduler, step, before)
    invariants.invariant_5_of_a_step(step)
    invariants.invariant_7(scheduler, step)
    invariants.invariant_14_of_a_step(scheduler, step)
    assert not step.finished_req_ids & set(step.num_scheduled_tokens)


def check_all_free(scheduler: Scheduler) -> None:
    """No trace of any request is left but what the prefix cache keeps."""
    invariants.invariant_15(scheduler)


# -- small helps --------------------------------------------------------------------------------


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
