"""What the engine hands to a scheduler, played: grammars, a KV connector, an encoder-cache one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jubako.kv_cache import LocalBlocks
from jubako.scheduler import GroupMatch, KVConnectorOutput, Request
from tests.scheduler.fake_model import EOS, Context, allowed_tokens
from tests.scheduler.mirror import Load


class FakeGrammars:
    """The grammar of `allowed_tokens`; compiled when the test says so, or never."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.broken: set[str] = set()
        self.accepted: dict[str, int] = {}
        self.released: set[str] = set()
        self.news: list[str] = []
        self.asked = 0

    def compile(self, request_id: str, breaks: bool = False) -> None:
        """The request's grammar is ready, or turns out to be none."""
        (self.broken if breaks else self.compiled).add(request_id)
        self.news.append(request_id)

    def is_ready(self, request: Request) -> bool:
        self.asked += 1
        if request.request_id in self.broken:
            raise ValueError("the grammar does not compile")
        return request.request_id in self.compiled

    def grammar_bitmask(
        self, requests: Sequence[Request], drafts: Mapping[str, list[int]]
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        rows = []
        for request in requests:
            state = self.accepted.get(request.request_id, 0)
            assert state == request.num_output_tokens, "the grammar is not where its request is"
            tentative = drafts.get(request.request_id, [])
            rows += [[allowed_tokens(state + i)] for i in range(1 + len(tentative))]
        return np.array(rows, dtype=np.int32)

    def accept_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        assert request.request_id not in self.released
        for token_id in token_ids:
            count = self.accepted.get(request.request_id, 0)
            assert allowed_tokens(count) >> token_id & 1, "a token that the grammar refuses"
            self.accepted[request.request_id] = count + 1

    def validate_drafts(self, request: Request, token_ids: list[int]) -> list[int]:
        state = self.accepted.get(request.request_id, 0)
        for position, token_id in enumerate(token_ids):
            if token_id < 0 or not allowed_tokens(state + position) >> token_id & 1:
                return token_ids[:position]
            if token_id == EOS:
                return token_ids[: position + 1]
        return token_ids

    def release(self, request: Request) -> None:
        assert request.request_id not in self.released, "released twice"
        self.released.add(request.request_id)


class EventfulGrammars(FakeGrammars):
    """Says by itself which grammars are ready, and is not to be asked before, but for the first
    time: a grammar may be ready before its request comes."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()

    def take_ready(self) -> list[str]:
        news, self.news = self.news, []
        return news

    def is_ready(self, request: Request) -> bool:
        told = self.compiled | self.broken
        assert request.request_id in told or request.request_id not in self.known
        self.known.add(request.request_id)
        return super().is_ready(request)


class FakeKVConnector:
    """Brings the KV of known prompts and keeps that of some requests for a while.

    `answers` says for each request what a lookup brings: how often it is not known yet, how many
    tokens beyond the local ones, and whether they come outside a step.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, int, bool]] = {}
        self.keeps: set[str] = set()
        """Requests whose blocks are sent after their end."""
        self.fails: dict[str, int] = {}
        """Block index at which the load of a request fails."""
        self.most: Callable[[Request], int] = lambda request: request.num_tokens
        self.pending: list[tuple[Load, bool]] = []
        self.sending: dict[str, tuple[list[int], ...]] = {}
        self.loading: dict[str, tuple[list[int], ...]] = {}
        """Loads outside steps that have not been reported, with the blocks that they fill."""
        self.finished: dict[str, int] = {}
        self.on_finished: Callable[[str, tuple[list[int], ...]], None] = lambda *_: None
        self._found: dict[str, tuple[int, int, bool]] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        request_id = request.request_id
        assert not request.skip_reading_prefix_cache
        later, external, is_async = self.answers.get(request_id, (0, 0, False))
        if later:
            self.answers[request_id] = (later - 1, external, is_async)
            return None, False
        most = min(self.most(request), request.num_tokens - (0 if is_async else 1))
        external = max(min(external, most - num_computed_tokens), 0)
        self._found[request_id] = (num_computed_tokens, external, is_async)
        return external, is_async and external > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        if not num_external_tokens:
            return
        local, external, is_async = self._found.pop(request_id)
        # An answer with which the request could not go on is rounded down.
        assert external >= num_external_tokens
        external = num_external_tokens
        tables = tuple(list(ids) for ids in blocks.get_block_ids())
        load = Load(
            request_id,
            tables,
            local,
            local + external,
            list(request.all_token_ids[: local + external]),
            Context.of(request),
            self.fails.get(request_id),
        )
        if is_async:
            self.loading[request_id] = tables
        # It is offered once: after a preemption the request computes what it needs itself.
        self.answers.pop(request_id, None)
        self.pending.append((load, not is_async))

    def build_connector_meta(self, scheduler_output: Any) -> list[tuple[Load, bool]]:
        pending, self.pending = self.pending, []
        return pending

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        received = connector_output.finished_recving or set()
        for request_id in received | (connector_output.failed_recving or set()):
            self.loading.pop(request_id, None)
        for request_id in connector_output.finished_sending or ():
            self.sending.pop(request_id, None)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        assert request.is_finished
        self.pending = [(load, now) for load, now in self.pending if load.request_id != request_id]
        self.finished[request_id] = self.finished.get(request_id, 0) + 1
        assert self.finished[request_id] == 1, "told twice that it ended"
        keeps = request_id in self.keeps and any(block_ids)
        if keeps:
            self.sending[request_id] = tuple(list(ids) for ids in block_ids)
        self.on_finished(request_id, block_ids)
        return keeps, {"kept": request_id} if keeps else None

    def reset_cache(self) -> bool:
        return True

    def shutdown(self) -> None: ...


class FakeGroupConnector(FakeKVConnector):
    """Brings to a model with several groups only the blocks that are not there.

    `answers` say how many tokens it knows, local ones included. A request can go on at multiples of
    `alignment` tokens.
    """

    def __init__(self, alignment: int) -> None:
        super().__init__()
        self.alignment = alignment
        self._matched: dict[str, tuple[int, bool, list[int]]] = {}

    def lookup_groups(self, request: Request, local: Sequence[LocalBlocks]) -> GroupMatch | None:
        request_id = request.request_id
        assert not request.skip_reading_prefix_cache
        later, known, is_async = self.answers.get(request_id, (0, 0, False))
        if later:
            self.answers[request_id] = (later - 1, known, is_async)
            return None
        total = min(known, self.most(request), request.num_tokens - (0 if is_async else 1))
        is_whole = total == request.num_tokens
        if not is_whole:
            total -= total % self.alignment
        missing = [group.missing(total - is_whole) for group in local]
        self._matched[request_id] = total, is_async, [group.block_size for group in local]
        load = tuple([range(index, index + 1) for index in indices] for indices in missing)
        return GroupMatch(total, load, is_async)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        if not num_external_tokens:
            return
        total, is_async, sizes = self._matched.pop(request_id)
        assert num_external_tokens <= total
        tables = []
        first = total
        for size, table in zip(sizes, blocks.blocks, strict=True):
            ids = [
                0 if block.is_null or block.block_hash else block.block_id
                for block in table[: -(-total // size)]
            ]
            first = min([first, *(i * size for i, block_id in enumerate(ids) if block_id)])
            tables.append(ids)
        tokens = list(request.all_token_ids[:total])
        load = Load(
            request_id,
            tuple(tables),
            first,
            total,
            tokens,
            Context.of(request),
            self.fails.get(request_id),
        )
        if is_async:
            self.loading[request_id] = tuple(list(ids) for ids in blocks.get_block_ids())
        self.answers.pop(request_id, None)
        self.pending.append((load, not is_async))


class FakeECConnector:
    """Has some encoder outputs; its instructions to the worker are their names."""

    def __init__(self, *identifiers: str) -> None:
        self.identifiers = set(identifiers)
        self.loads: list[str] = []

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self.identifiers

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.loads.append(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> list[str]:
        loads, self.loads = self.loads, []
        return loads

    def update_connector_output(self, connector_output: Any) -> None: ...

    def request_finished(self, request: Request) -> tuple[bool, None]:
        return False, None

    def shutdown(self) -> None: ...
