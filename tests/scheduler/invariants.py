"""What must hold of a scheduler after every call, and of the records of every step.

One function for each invariant, by its number in the design: `invariant_1` and so on. What a single
moment cannot show (that an id is new once, that outputs add up) is kept by the `History` of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jubako.kv_cache import KVCacheBlock, MambaSpec
from jubako.scheduler import (
    EngineCoreOutput,
    FinishReason,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from tests.kv_cache.invariants import check_pool, check_tables, owners_of
from tests.scheduler.fake_model import Answer, first_read

# -- the state between two calls ----------------------------------------------------------------


def invariant_1(scheduler: Scheduler) -> None:
    """Every known request is in exactly one place, and its status says which."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    ids = [r.request_id for r in running] + [r.request_id for r in waiting]
    assert len(ids) == len(set(ids))
    assert set(ids) == set(scheduler.requests)
    assert all(scheduler.requests[r.request_id] is r for r in running + waiting)
    assert len(scheduler.waiting) == len(waiting)
    assert scheduler.get_request_counts() == (len(running), len(waiting))
    assert all(r.status is RequestStatus.RUNNING for r in running)
    assert all(r.status <= RequestStatus.PREEMPTED for r in waiting)
    assert all(r.status is not RequestStatus.RUNNING for r in waiting)


def invariant_4_between_steps(scheduler: Scheduler, steps_in_flight: int) -> None:
    """Nobody has computed more than is known or under way, nor more than a context."""
    for request in scheduler.requests.values():
        assert request.num_tokens == len(request.all_token_ids)
        assert 0 <= request.num_computed_tokens <= scheduler.max_model_len
        assert request.num_output_placeholders >= 0
        if not steps_in_flight:
            assert request.num_output_placeholders == 0
            assert request.num_computed_tokens <= request.num_tokens


def invariant_5(scheduler: Scheduler) -> None:
    """Who gave way holds nothing; nor does anybody else who has no reason to."""
    for request in scheduler.requests.values():
        if request.status is RequestStatus.PREEMPTED and not request.num_computed_tokens:
            assert request.spec_token_ids == []
            assert not request.is_prefill_chunk
            assert not _holds_blocks(scheduler, request)
        elif request.status is RequestStatus.PREEMPTED:
            # Its KV was brought back from elsewhere, or what it was to run on did not come.
            assert scheduler.connector is not None or scheduler.ec_connector is not None
        elif request.status is RequestStatus.WAITING and not request.num_computed_tokens:
            assert not _holds_blocks(scheduler, request)
        elif request.status is RequestStatus.WAITING_FOR_FSM:
            assert not _holds_blocks(scheduler, request)
            assert request.num_computed_tokens == 0


def _holds_blocks(scheduler: Scheduler, request: Request) -> bool:
    return any(scheduler.kv_cache_manager.get_block_ids(request.request_id))


def invariant_14(scheduler: Scheduler) -> None:
    """The account of encoder outputs balances, and only living requests refer to any."""
    cache = scheduler.encoder_cache_manager
    sizes = cache._sizes
    assert set(sizes) == set(cache.cached)
    assert cache.num_free_slots + sum(sizes.values()) == cache.cache_size
    assert set(cache.freeable) == {name for name, refs in cache.cached.items() if not refs}
    assert all(cache.freeable[name] == sizes[name] for name in cache.freeable)
    assert cache.num_freeable_slots == cache.num_free_slots + sum(cache.freeable.values())
    assert 0 <= cache.num_free_slots <= cache.num_freeable_slots <= cache.cache_size
    for refs in cache.cached.values():
        for request_id, input_id in refs:
            request = scheduler.requests[request_id]
            assert request.status is not RequestStatus.PREEMPTED
            place = request.mm_features[input_id].mm_position
            if not request.num_output_placeholders:
                assert request.num_computed_tokens <= place.offset + place.length


def hashes_name_all_full_blocks(scheduler: Scheduler) -> None:
    """Each request has one hash for each block that its tokens fill."""
    if scheduler.block_hasher is None:
        return
    for request in scheduler.requests.values():
        assert len(request.block_hashes) == request.num_tokens // scheduler.hash_block_size


def invariant_15(scheduler: Scheduler) -> None:
    """No trace of any request is left but what the prefix cache keeps."""
    manager = scheduler.kv_cache_manager
    assert manager.usage == 0
    if scheduler.kv_cache_config.kv_cache_groups:
        check_pool(manager.block_pool, Counter(), _sinks(scheduler))
    assert not manager._edges
    for group in manager.coordinator.single_type_managers:
        assert not group.req_to_blocks
        assert not group.num_cached_block
        assert not getattr(group, "_align", None)
    assert scheduler.encoder_cache_manager.num_freeable_slots == (
        scheduler.encoder_cache_manager.cache_size
    )
    assert not scheduler.running
    assert len(scheduler.waiting) == 0
    for name in ("_prefilling", "_failed", "_held_blocks", "_loaded", "_finished_recving"):
        assert not getattr(scheduler, name, None), name


def _sinks(scheduler: Scheduler) -> list[int]:
    return [
        block.block_id
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
        for block in getattr(manager, "sink_blocks", ())
    ]


def blocks_are_owned(
    scheduler: Scheduler, held: Iterable[tuple[list[int], ...]], evicted: bool
) -> None:
    """Every block is free or owned as often as tables and transfers hold it; tables fit together.

    `held` are the tables of ended requests that a transfer still needs. `evicted`: blocks in use
    have been made unfindable.
    """
    manager = scheduler.kv_cache_manager
    blocks = manager.block_pool.blocks
    detached: list[list[KVCacheBlock]] = [
        [blocks[block_id] for block_id in ids] for tables in held for ids in tables
    ]
    check_pool(manager.block_pool, owners_of(manager, detached), _sinks(scheduler))
    known: Mapping[str, Request] = scheduler.requests
    check_tables(manager, known, evicted)  # type: ignore[arg-type]


# -- the records of a step ----------------------------------------------------------------------


def invariant_2(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """Budget, places and adapters are kept to."""
    counts = step.num_scheduled_tokens
    assert all(count >= 1 for count in counts.values())
    assert sum(counts.values()) == step.total_num_scheduled_tokens
    assert step.total_num_scheduled_tokens <= scheduler.max_num_scheduled_tokens
    assert len(scheduler.running) <= scheduler.max_num_running_reqs
    if scheduler.max_loras is not None:
        assert len(adapters(scheduler, counts)) <= scheduler.max_loras


def adapters(scheduler: Scheduler, request_ids: Iterable[str]) -> set[int]:
    """The adapters of these requests."""
    requests = (scheduler.requests[request_id] for request_id in request_ids)
    return {r.lora_request.lora_int_id for r in requests if r.lora_request is not None}


def invariant_3(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """The two kinds of records are the step, without overlap."""
    counts = step.num_scheduled_tokens
    new = [data.req_id for data in step.scheduled_new_reqs]
    cached = step.scheduled_cached_reqs
    assert len(new) + len(cached.req_ids) == len(counts)
    assert set(new) | set(cached.req_ids) == set(counts)
    assert cached.resumed_req_ids <= set(cached.req_ids)
    assert len(cached.req_ids) == len(cached.new_block_ids) == len(cached.num_computed_tokens)
    assert len(cached.num_output_tokens) == cached.num_reqs
    for data in step.scheduled_new_reqs:
        assert (data.seed is not None) == (data.sampling_params is not None)
    for part in (step.scheduled_spec_decode_tokens, step.scheduled_encoder_inputs):
        assert set(part) <= set(counts)
        assert all(part.values())


def invariant_4(scheduler: Scheduler, step: SchedulerOutput, before: Mapping[str, int]) -> None:
    """Computed tokens have grown by exactly what is scheduled."""
    new = {data.req_id: data.num_computed_tokens for data in step.scheduled_new_reqs}
    cached = step.scheduled_cached_reqs
    told = new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request_id, request in scheduler.requests.items():
        count = step.num_scheduled_tokens.get(request_id)
        if count is None:
            if request.status is RequestStatus.RUNNING:
                assert request.num_computed_tokens == before[request_id]
            continue
        assert request.num_computed_tokens == told[request_id] + count
        last = scheduler.max_model_len - (request.sampling_params is not None)
        assert request.num_computed_tokens <= last
        if request_id not in new and request_id not in cached.resumed_req_ids:
            assert told[request_id] == before[request_id]
        else:
            assert told[request_id] < request.num_tokens


def invariant_5_of_a_step(step: SchedulerOutput) -> None:
    """Who gives way is not scheduled, and nobody is admitted in its place."""
    if step.preempted_req_ids:
        assert not step.scheduled_new_reqs
        assert not step.scheduled_cached_reqs.resumed_req_ids
        assert not step.preempted_req_ids & set(step.num_scheduled_tokens)


def invariant_5_of_victims(
    scheduler: Scheduler, step: SchedulerOutput, running_before: list[Request]
) -> None:
    """Those give way that came last, or that are least urgent."""
    gone = step.preempted_req_ids or set()
    victims = [r for r in running_before if r.request_id in gone]
    kept = [r for r in running_before if r.status is RequestStatus.RUNNING]
    if scheduler.policy == "priority":
        assert not victims or not kept or max(kept) < min(victims)
    else:
        assert running_before[len(running_before) - len(victims) :] == victims or not kept


def invariant_7(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """In each group the blocks of a scheduled request hold all that its chunk reads and writes."""
    cached = step.scheduled_cached_reqs
    for request_id, count in step.num_scheduled_tokens.items():
        request = scheduler.requests[request_id]
        stop = request.num_computed_tokens
        start = stop - count
        slots = stop
        if request_id in cached.req_ids and request_id not in cached.resumed_req_ids:
            # A first chunk is followed by no drafts.
            slots = min(stop + scheduler.num_lookahead_tokens, scheduler.max_model_len)
        tables = scheduler.kv_cache_manager.get_block_ids(request_id)
        for group, table in zip(scheduler.kv_cache_config.kv_cache_groups, tables, strict=True):
            spec = group.kv_cache_spec
            size = spec.block_size
            if isinstance(spec, MambaSpec):
                assert len(table) * size >= stop
                assert table[(stop - 1) // size] != 0
                if start and not spec.num_speculative_blocks:
                    assert table[(start - 1) // size] != 0
                continue
            assert len(table) * size >= slots
            first = first_read(spec, start)
            assert all(table[first // size : -(-stop // size)])


def invariant_8(
    scheduler: Scheduler, step: SchedulerOutput, given: Mapping[str, list[int]]
) -> None:
    """Drafts in a step are among those given, and no more than the step has room for."""
    for request_id, drafts in step.scheduled_spec_decode_tokens.items():
        assert len(drafts) <= step.num_scheduled_tokens[request_id] - 1
        if request_id in given:
            assert drafts == given[request_id][: len(drafts)]


def invariant_8_after_update(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """A request that decodes is one token behind. Not while steps overlap."""
    for request_id in step.num_scheduled_tokens:
        request = scheduler.requests.get(request_id)
        if request is not None and request.status is RequestStatus.RUNNING:
            assert request.is_prefill_chunk or (
                request.num_computed_tokens == request.num_tokens - 1
            )


def invariant_14_of_a_step(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """Items are encoded once, within the budget; unsplittable ones stay whole."""
    encoded: Counter[str] = Counter()
    size = 0
    for request_id, inputs in step.scheduled_encoder_inputs.items():
        request = scheduler.requests[request_id]
        assert inputs == sorted(set(inputs))
        for index in inputs:
            encoded[request.mm_features[index].identifier] += 1
            size += request.media_embeds[index]
    assert all(count == 1 for count in encoded.values())
    assert size <= scheduler.max_encoder_tokens
    assert len(step.free_encoder_mm_hashes) == len(set(step.free_encoder_mm_hashes))
    if scheduler.config.scheduler_config.disable_chunked_mm_input:
        for request_id in step.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            for feature in request.mm_features:
                place = feature.mm_position
                inside = place.offset < request.num_computed_tokens < place.offset + place.length
                assert not inside, f"{request_id} stops inside an item"


def encoder_references(scheduler: Scheduler) -> dict[str, set[tuple[str, int]]]:
    """Which encoder outputs each request holds, and for which of its items."""
    held: dict[str, set[tuple[str, int]]] = {}
    for identifier, refs in scheduler.encoder_cache_manager.cached.items():
        for request_id, input_id in refs:
            held.setdefault(request_id, set()).add((identifier, input_id))
    return held


def invariant_14_of_the_unscheduled(
    scheduler: Scheduler, step: SchedulerOutput, before: Mapping[str, set[tuple[str, int]]]
) -> None:
    """Who is not in a step holds the encoder outputs that it held; who gave way holds none."""
    after = encoder_references(scheduler)
    for request_id, request in scheduler.requests.items():
        if request.status is RequestStatus.PREEMPTED:
            assert request_id not in after
        elif request_id not in step.num_scheduled_tokens:
            held, had = after.get(request_id, set()), before.get(request_id, set())
            if scheduler.drafter_shift:
                # What only a drafter could still read may have given way.
                assert held <= had
                had = {entry for entry in had if not _is_passed(request, entry[1])}
                held = {entry for entry in held if not _is_passed(request, entry[1])}
            assert held == had


def _is_passed(request: Request, input_id: int) -> bool:
    place = request.mm_features[input_id].mm_position
    return place.offset + place.length <= request.num_computed_tokens


# -- over a run ---------------------------------------------------------------------------------


@dataclass
class History:
    """What has been seen so far, as far as an invariant speaks of more than one moment."""

    new: set[str] = field(default_factory=set)
    flushed: set[str] = field(default_factory=set)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    pooled: dict[str, int] = field(default_factory=dict)
    ended: dict[str, EngineCoreOutput] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    overtaken: dict[str, int] = field(default_factory=dict)
    """How often later requests were admitted before each; bounded by `admission_lookahead`."""

    def invariant_3(self, scheduler: Scheduler, step: SchedulerOutput) -> None:
        """An id is new once, streaming sessions apart."""
        for data in step.scheduled_new_reqs:
            assert data.req_id not in self.new or scheduler.requests[data.req_id].resumable
            self.new.add(data.req_id)

    def invariant_9(self, step: SchedulerOutput) -> None:
        """The workers hear of every end once, and never again of the request."""
        assert not step.finished_req_ids & self.flushed
        self.flushed |= step.finished_req_ids
        assert not self.flushed & set(step.num_scheduled_tokens)
        assert not self.flushed & (step.preempted_req_ids or set())

    def invariant_9_first_step(self, step: SchedulerOutput) -> None:
        """The first step after an end tells of it."""
        assert self.ended.keys() | self.aborted == self.flushed

    def invariant_10(self, output: EngineCoreOutput, is_session: bool = False) -> None:
        """One last output, nothing after it, and nothing after an abort.

        A session has one at the end of each turn.
        """
        request_id = output.request_id
        assert is_session or request_id not in self.ended, "an output after the last"
        assert request_id not in self.aborted, "an output after an abort"
        self.outputs.setdefault(request_id, []).extend(output.new_token_ids)
        if output.pooling_output is not None:
            self.pooled[request_id] = output.pooling_output
        if output.finished:
            self.ended[request_id] = output
        assert output.new_token_ids or output.finished, "an output without content"

    def invariant_11(self, request: Request, max_model_len: int) -> None:
        """Neither `max_tokens` nor the context is exceeded; a stop token is the last token."""
        output = self.outputs.get(request.request_id, [])
        params = request.sampling_params
        if params is None:
            assert not output
            return
        assert params.max_tokens is None or len(output) <= params.max_tokens
        assert request.num_prompt_tokens + len(output) <= max_model_len
        ends: set[int | None] = set(params.stop_ids)
        if not params.ignore_eos:
            ends.add(request.eos_token_id)
        for position, token_id in enumerate(output[:-1], start=1):
            assert token_id not in ends or position < params.min_tokens

    def invariant_12(self, request: Request, alone: Answer) -> None:
        """The answer is the one that the request gets alone."""
        request_id = request.request_id
        got = self.outputs.get(request_id, [])
        end = self.ended.get(request_id)
        if end is None or end.finish_reason is FinishReason.ERROR:
            assert got == alone.tokens[: len(got)]
            return
        assert got == alone.tokens, request
        assert self.pooled.get(request_id) == alone.pooled
        assert (end.finish_reason, end.stop_reason) == (alone.finish_reason, alone.stop_reason)

    def invariant_13(
        self, scheduler: Scheduler, queue: list[Request], step: SchedulerOutput
    ) -> None:
        """Admission follows the queue, but for who waits for something; overtaking is bounded.

        `queue` holds, in order, who could have been admitted before the step.
        """
        admitted = {data.req_id for data in step.scheduled_new_reqs}
        admitted |= step.scheduled_cached_reqs.resumed_req_ids
        if not admitted:
            return
        waiting = [r for r in scheduler.waiting if r.awaits_admission]
        left = {r.request_id for r in waiting}
        limit = scheduler.max_loras
        # Who runs may be scheduled again at any time.
        running = {r.request_id for r in scheduler.running}
        used = adapters(scheduler, running | set(step.num_scheduled_tokens))
        full = limit is not None and len(used) >= limit
        for position, request in enumerate(queue):
            adapter = request.lora_request
            if full and adapter is not None and adapter.lora_int_id not in used:
                continue
            if request.request_id in left:
                behind = [r for r in queue[position + 1 :] if r.request_id in admitted]
                count = self.overtaken.get(request.request_id, 0) + len(behind)
                self.overtaken[request.request_id] = count
                assert count <= scheduler.admission_lookahead, f"{request} overtaken by {behind}"

    def invariant_13_order(self, scheduler: Scheduler, queue: list[Request]) -> None:
        """Being passed over changes nobody's place among those that stay."""
        places = {r.request_id: place for place, r in enumerate(scheduler.waiting)}
        stay = [places[r.request_id] for r in queue if r.request_id in places]
        assert stay == sorted(stay)
