"""A worker without a model: it applies the records of each step and keeps what its slots hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jubako.kv_cache import KVCacheSpec, MambaSpec
from jubako.scheduler import (
    ECConnectorOutput,
    GrammarOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    Scheduler,
    SchedulerOutput,
)
from tests.scheduler.fake_model import VOCAB, Context, Prefixes, choose, first_read

STATE = -1
"""Where the state of a recurrent layer lies in a block."""

NEVER_RIGHT = VOCAB + 1
"""A token that the model never chooses."""

MOST_DRAFTS_UNDER_WAY = 16

GARBAGE = -7
"""What is in a slot after a load that failed."""


class Memory:
    """What the blocks hold. A block belongs to the group that wrote it last."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, dict[int, int]]] = {}

    def write(self, group: int, block_id: int, offset: int, number: int) -> None:
        assert block_id != 0, f"group {group} writes to the null block"
        held = self.blocks.get(block_id)
        if held is None or held[0] != group:
            held = self.blocks[block_id] = (group, {})
        held[1][offset] = number

    def read(self, group: int, block_id: int, offset: int) -> int | None:
        held = self.blocks.get(block_id)
        if held is None or held[0] != group or block_id == 0:
            return None
        return held[1].get(offset)

    def copy_of(self, block_ids: Iterable[int]) -> dict[int, Any]:
        return {i: (held[0], dict(held[1])) for i in block_ids if (held := self.blocks.get(i))}


@dataclass
class Load:
    """KV that a connector brings: the tokens `[local, total)` of a request.

    `first_bad` is the block index, in every group, at which the load fails; None for a good one.
    """

    request_id: str
    tables: tuple[list[int], ...]
    local: int
    total: int
    tokens: list[int]
    context: Context
    first_bad: int | None = None

    def run(self, memory: Memory, specs: Sequence[KVCacheSpec]) -> set[int]:
        """Write what comes; the ids of blocks that did not come."""
        prefixes = Prefixes(self.context)
        numbers = prefixes.of(self.tokens[: self.total])
        invalid: set[int] = set()
        for group, (spec, table) in enumerate(zip(specs, self.tables, strict=True)):
            size = spec.block_size
            # What was found locally is not loaded; that may end inside a block of another size.
            for index in range(self.local // size, -(-self.total // size)):
                if index >= len(table) or table[index] == 0:
                    continue
                bad = self.first_bad is not None and index >= self.first_bad
                if bad:
                    invalid.add(table[index])
                if isinstance(spec, MambaSpec):
                    number = GARBAGE if bad else prefixes.state_after(self.total)
                    memory.write(group, table[index], STATE, number)
                    continue
                start, stop = max(index * size, self.local), min(index * size + size, self.total)
                for position in range(start, stop):
                    number = GARBAGE if bad else numbers[position]
                    memory.write(group, table[index], position % size, number)
        return invalid


@dataclass
class MirroredRequest:
    prompt_length: int
    tokens: list[int]
    """Prompt and the outputs that this worker sampled or was told."""
    block_ids: list[list[int]]
    num_computed: int
    prefixes: Prefixes
    features: list[Any]
    pools: bool
    context: Context
    drafts: list[int] = field(default_factory=list)
    is_void: bool = False
    """Whether what it computes is worth nothing, until the scheduler has taken it back."""


@dataclass
class Forward:
    """A step that has been computed but not sampled."""

    step: SchedulerOutput
    chunks: dict[str, list[int]]
    """Of each request, all tokens up to the end of its chunk."""
    drafts: dict[str, list[int]]
    kv_report: KVConnectorOutput
    ec_report: ECConnectorOutput


class WorkerMirror:
    """Applies the records as a worker does, and keeps in each KV slot what was written there.

    Reading a slot checks that it holds the KV of exactly the reader's prefix. Not `strict`, what is
    read wrongly changes the answer instead.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.strict = True
        self.makes_drafts = False
        """Whether this worker guesses what follows; some of its guesses are wrong."""
        groups = scheduler.kv_cache_config.kv_cache_groups
        self.specs = [group.kv_cache_spec for group in groups]
        self.requests: dict[str, MirroredRequest] = {}
        self.memory = Memory()
        self.seen: set[str] = set()
        self.finished: set[str] = set()
        self.last_batch: set[str] = set()
        self.encoder_cache: set[str] = set()
        self.loads: dict[str, Load] = {}
        """Loads outside steps that are under way."""
        self.unreadable_outputs: set[str] = set()
        """Encoder outputs whose loads fail."""
        self.untold_outputs: set[str] = set()
        """Outputs that the next step was to load, of which the worker never hears."""
        self._wrong_from: dict[str, int] = {}
        """Requests that run in this step on what did not come, and the first position of that."""
        self._missing_outputs: set[str] = set()
        self.kv_report = KVConnectorOutput()
        """For the next result."""

    def execute(
        self, step: SchedulerOutput, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        """Compute the step, checking every KV slot that is read."""
        return self.sample(self.forward(step), grammar)

    # -- records ------------------------------------------------------------------------------

    def apply(self, step: SchedulerOutput) -> None:
        """Take over what the records say."""
        for request_id in step.finished_req_ids:
            assert request_id not in self.finished, "told twice that it ended"
            self.finished.add(request_id)
            self.requests.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            assert new.req_id not in self.seen or request.resumable, "new twice"
            assert new.prompt_token_ids is not None
            self.seen.add(new.req_id)
            context = Context.of(request)
            self.requests[new.req_id] = MirroredRequest(
                len(new.prompt_token_ids),
                list(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
                Prefixes(context),
                new.mm_features,
                new.pooling_params is not None,
                context,
            )
        cached = step.scheduled_cached_reqs
        assert cached.new_token_ids == []
        for row, request_id in enumerate(cached.req_ids):
            state = self.requests[request_id]
            new_ids = cached.new_block_ids[row]
            resumed = request_id in cached.resumed_req_ids
            if resumed:
                assert new_ids is not None
                state.block_ids = [list(ids) for ids in new_ids]
                assert request_id in cached.all_token_ids
                state.drafts = []
                if state.is_void:
                    state.is_void = False
                    state.prefixes = Prefixes(state.context)
            elif new_ids is not None:
                assert any(new_ids)
                for table, ids in zip(state.block_ids, new_ids, strict=True):
                    table += ids
            self._take_count(state, cached.num_computed_tokens[row], resumed)
            if not resumed:
                sat_out = request_id not in self.last_batch
                assert (request_id in cached.all_token_ids) == sat_out
            if state.is_void:
                continue
            if request_id in cached.all_token_ids:
                told = cached.all_token_ids[request_id]
                common = min(len(told), len(state.tokens))
                assert told[:common] == state.tokens[:common]
                # Fewer than this worker sampled: the others are in flight, or have been dropped.
                in_flight = cached.num_output_tokens[row] + state.prompt_length - len(told)
                if resumed:
                    state.tokens = list(told)
                else:
                    assert len(state.tokens) <= len(told) + in_flight
                    state.tokens += told[common:]
            assert cached.num_output_tokens[row] >= len(state.tokens) - state.prompt_length
        self.last_batch = set(step.num_scheduled_tokens)

    def _take_count(self, state: MirroredRequest, told: int, resumed: bool) -> None:
        if resumed:
            state.num_computed = told
        elif self.makes_drafts:
            # The scheduler may not know yet which drafts this worker refused.
            assert state.num_computed <= told <= state.num_computed + MOST_DRAFTS_UNDER_WAY
        else:
            assert state.num_computed == told

    # -- the step -----------------------------------------------------------------------------

    def forward(self, step: SchedulerOutput) -> Forward:
        """Load, encode, write and read KV; the tokens are not chosen yet."""
        self.apply(step)
        self._wrong_from = {}
        self._start_loads(step)
        ec_report = self._encode(step)
        chunks: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        for request_id, count in step.num_scheduled_tokens.items():
            state = self.requests[request_id]
            drafts[request_id] = self._drafts_of(step, request_id)
            tokens = (state.tokens + drafts[request_id])[: state.num_computed + count]
            assert len(tokens) == state.num_computed + count, "told to compute unknown tokens"
            chunks[request_id] = tokens
            self._check_table(request_id, state, len(tokens))
            self._check_media(request_id, state, len(tokens))
            if request_id in self._wrong_from:
                # From there on, whatever it writes is wrong.
                state.is_void = True
                media = state.prefixes.context.media | {self._wrong_from[request_id]: GARBAGE}
                state.prefixes = Prefixes(replace(state.context, media=media))
            state.prefixes.of(tokens)
        # All states are read before any is written: a step may hand one on.
        errors = {i: self._read_states(self.requests[i]) for i in chunks}
        for request_id, tokens in chunks.items():
            self._write(self.requests[request_id], tokens)
        for request_id, tokens in chunks.items():
            state = self.requests[request_id]
            errors[request_id] += self._read(state, len(tokens))
            if errors[request_id]:
                state.prefixes.spoil(errors[request_id])
                state.prefixes.of(tokens)
        report, self.kv_report = self.kv_report, KVConnectorOutput()
        return Forward(step, chunks, drafts, report, ec_report)

    def _drafts_of(self, step: SchedulerOutput, request_id: str) -> list[int]:
        drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
        if -1 in drafts:
            # Planned before they were known: the worker's own, and padding that is never right.
            own = self.requests[request_id].drafts
            drafts = (own + [NEVER_RIGHT] * len(drafts))[: len(drafts)]
        return drafts

    def _check_table(self, request_id: str, state: MirroredRequest, length: int) -> None:
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        for group, (mine, table) in enumerate(zip(state.block_ids, tables, strict=True)):
            assert len(mine) == len(table)
            # A table entry that no later token reads may have turned into null since.
            assert all(b in (a, 0) for a, b in zip(mine, table, strict=True)), f"group {group}"

    def _write(self, state: MirroredRequest, tokens: list[int]) -> None:
        numbers = state.prefixes.numbers
        start, stop = state.num_computed, len(tokens)
        for group, spec in enumerate(self.specs):
            size, table = spec.block_size, state.block_ids[group]
            if not isinstance(spec, MambaSpec):
                for position in range(start, stop):
                    block_id = table[position // size]
                    self.memory.write(group, block_id, position % size, numbers[position])
                continue
            if spec.num_speculative_blocks:
                # Where states of drafts lie is the kernels' business.
                continue
            ends = {stop}
            if spec.mamba_cache_mode == "all":
                ends |= set(range((start // size + 1) * size, stop, size))
            for end in ends:
                after = state.prefixes.state_after(end)
                self.memory.write(group, table[(end - 1) // size], STATE, after)

    def _read_states(self, state: MirroredRequest) -> int:
        """How wrong the states are that the chunk starts from."""
        error, count = 0, 0 if state.is_void else state.num_computed
        for group, spec in enumerate(self.specs):
            if not isinstance(spec, MambaSpec) or spec.num_speculative_blocks or not count:
                continue
            block_id = state.block_ids[group][(count - 1) // spec.block_size]
            held = self.memory.read(group, block_id, STATE)
            error += self._judge(held, state.prefixes.state_after(count), group, block_id, count)
        return error

    def _read(self, state: MirroredRequest, stop: int) -> int:
        """How wrong the KV is that the chunk reads."""
        error, start, numbers = 0, state.num_computed, state.prefixes.numbers
        for group, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec) or state.is_void:
                continue
            size, table = spec.block_size, state.block_ids[group]
            wanted = range(first_read(spec, start), stop)
            last = first_read(spec, stop - 1)
            for position in wanted:
                if start <= position < last:
                    # Read by its own token only, which has just written it.
                    continue
                block_id = table[position // size]
                held = self.memory.read(group, block_id, position % size)
                if held != numbers[position]:
                    error += self._judge(held, numbers[position], group, block_id, position)
        return error

    def _judge(self, held: int | None, wanted: int, group: int, block_id: int, at: int) -> int:
        if held == wanted:
            return 0
        assert not self.strict, (
            f"group {group}: block {block_id} does not hold what token {at} needs"
        )
        return 1 + (held or 0) - wanted

    # -- media and loads ----------------------------------------------------------------------

    def _encode(self, step: SchedulerOutput) -> ECConnectorOutput:
        for identifier in step.free_encoder_mm_hashes:
            if identifier in self._missing_outputs:
                # The scheduler did not know yet that it had not come.
                self._missing_outputs.discard(identifier)
            else:
                self.encoder_cache.remove(identifier)
        report = ECConnectorOutput()
        self._missing_outputs |= self.untold_outputs
        self.untold_outputs.clear()
        for identifier in step.ec_connector_metadata or ():
            assert identifier not in self.encoder_cache, "loaded although it is here"
            if identifier in self.unreadable_outputs:
                report.failed_recving = (report.failed_recving or set()) | {identifier}
            else:
                self.encoder_cache.add(identifier)
                self._missing_outputs.discard(identifier)
        self._missing_outputs |= report.failed_recving or set()
        for request_id, inputs in step.scheduled_encoder_inputs.items():
            for index in inputs:
                identifier = self.requests[request_id].features[index].identifier
                assert identifier not in self.encoder_cache, "encoded although it is here"
                self.encoder_cache.add(identifier)
                self._missing_outputs.discard(identifier)
        return report

    def _check_media(self, request_id: str, state: MirroredRequest, stop: int) -> None:
        """The outputs of all items that stand in the chunk are here, unless their load failed."""
        for feature in state.features:
            place = feature.mm_position
            offset = place.offset
            first, last = max(offset, state.num_computed), min(offset + place.length, stop)
            mask = place.is_embed
            if first < last and (mask is None or any(mask[first - offset : last - offset])):
                if feature.identifier in self._missing_outputs:
                    self._wrong_from.setdefault(request_id, offset)
                elif not state.is_void:
                    assert feature.identifier in self.encoder_cache, "an encoder output is missing"

    def _start_loads(self, step: SchedulerOutput) -> None:
        for load, in_step in step.kv_connector_metadata or ():
            if in_step:
                if self._run_load(load):
                    self._wrong_from[load.request_id] = load.local
            else:
                assert load.request_id not in self.loads
                self.loads[load.request_id] = load

    def finish_load(self, request_id: str, fails: bool = False) -> None:
        """A load outside steps ends; the next result says so. `fails`: as a whole."""
        load = self.loads.pop(request_id)
        if fails:
            load.first_bad = 0
            load.run(self.memory, self.specs)
            failed = self.kv_report.failed_recving or set()
            self.kv_report.failed_recving = failed | {request_id}
            return
        self._run_load(load)
        received = self.kv_report.finished_recving or set()
        self.kv_report.finished_recving = received | {request_id}

    def _run_load(self, load: Load) -> bool:
        invalid = load.run(self.memory, self.specs)
        self.kv_report.invalid_block_ids = self.kv_report.invalid_block_ids | invalid
        return bool(invalid)

    # -- sampling -----------------------------------------------------------------------------

    def sample(self, forward: Forward, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Choose the tokens of a step."""
        masks: dict[str, list[int]] = {}
        if grammar is not None:
            row = 0
            for request_id in grammar.structured_output_request_ids:
                drafts = forward.step.scheduled_spec_decode_tokens.get(request_id, ())
                rows = grammar.grammar_bitmask[row : row + 1 + len(drafts)]
                masks[request_id] = [int(bits) for bits in rows[:, 0]]
                row += 1 + len(drafts)
            assert row == len(grammar.grammar_bitmask)
        sampled: dict[str, list[int]] = {}
        pooled: dict[str, int | None] = {}
        for request_id, tokens in forward.chunks.items():
            state = self.requests[request_id]
            pooled[request_id] = None
            if state.pools:
                state.num_computed = len(tokens)
                sampled[request_id] = []
                if len(tokens) == len(state.tokens):
                    pooled[request_id] = state.prefixes.numbers[-1]
            else:
                sampled[request_id] = self._sample(state, tokens, masks.get(request_id))
        # Rows need not be in the scheduler's order.
        req_ids = list(reversed(forward.chunks))
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(req_ids)},
            sampled_token_ids=[sampled[request_id] for request_id in req_ids],
            pooler_output=[pooled[i] for i in req_ids]
            if any(number is not None for number in pooled.values())
            else None,
            kv_connector_output=_unless_empty(forward.kv_report),
            ec_connector_output=_unless_empty(forward.ec_report),
        )

    def _sample(
        self, state: MirroredRequest, tokens: list[int], masks: list[int] | None
    ) -> list[int]:
        known = len(state.tokens)
        state.num_computed = len(tokens)
        if len(tokens) < known:
            return []
        accepted: list[int] = []
        numbers = state.prefixes.of(tokens)
        for row, position in enumerate(range(known, len(tokens) + 1)):
            accepted.append(choose(numbers[position - 1], None if masks is None else masks[row]))
            if position < len(tokens) and tokens[position] != accepted[-1]:
                break
        state.tokens += accepted
        state.num_computed = len(state.tokens) - 1
        if self.makes_drafts:
            state.drafts = self._guess(state)
        return accepted

    def _guess(self, state: MirroredRequest) -> list[int]:
        tokens = list(state.tokens)
        right = state.prefixes.of(tokens)[-1] % 4
        for _ in range(right):
            tokens.append(choose(state.prefixes.of(tokens)[-1]))
        guess = tokens[len(state.tokens) :]
        return guess + [NEVER_RIGHT] * (3 - len(guess))


def _unless_empty(report: Any) -> Any:
    return None if report == type(report)() else report
