"""What does the scheduler need from rooms above it?

Grammars and connectors import more than the scheduler may, so they are handed in as objects that
satisfy these protocols. Each is optional; None means that the feature is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jubako.kv_cache import KVCacheBlocks
from jubako.scheduler.model_output import ECConnectorOutput, KVConnectorOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.request import Request


class StructuredOutputManager(Protocol):
    """Grammars that constrain what requests may generate.

    It may also have `take_ready() -> Iterable[str]`: ids of requests whose grammars have been
    compiled, or could not be, since the last call. Then a request that waits for its grammar is
    asked about when it arrives and when it is named; without it, in every step.
    """

    def is_ready(self, request: Request) -> bool:
        """Whether the request's grammar is compiled; raises if it cannot be."""
        ...

    def grammar_bitmask(
        self, requests: Sequence[Request], drafts: Mapping[str, list[int]]
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Allowed tokens, `1 + drafts` rows a request, in order."""
        ...

    def accept_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        """Advance the request's grammar over tokens that were kept."""
        ...

    def validate_drafts(self, request: Request, token_ids: list[int]) -> list[int]:
        """The drafts before the first that the grammar refuses."""
        ...

    def release(self, request: Request) -> None:
        """The request has ended."""
        ...


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """KV that a connector can bring to a model with several groups of layers."""

    num_tokens: int
    """Tokens from which the request can go on then, local ones included."""
    load: tuple[Sequence[range], ...]
    """For each group the blocks that come, as indices into the request's table. More than are
    needed does no harm."""
    is_async: bool
    """Whether they come outside a step."""


class KVConnector(Protocol):
    """The scheduler's half of a connector that brings KV from elsewhere and takes it there.

    It may also have `lookup_groups(request, local) -> GroupMatch | None`, which is asked instead of
    `get_num_new_matched_tokens` where there are several groups: `local` has one
    `jubako.kv_cache.LocalBlocks` for each, so that nothing is brought that is here, and None means
    that it is not known yet. Of the blocks it is told of, it fills those that are real and have no
    hash. It may have `on_new_request(request)`, called when a request arrives;
    `get_kv_connector_stats()`, whose result joins the workers' statistics; `take_events()`, cache
    events since the last call; `has_pending_push_work()`, whether to go on stepping although no
    request is left; `cancel_lookup(request)`, `cancel_load(request)` and `cancel_send(request)`,
    when an answer or a report is overdue. A load that is cancelled must still be reported; blocks
    whose sending is cancelled are used again at once.
    """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the `num_computed_tokens` local ones that can be loaded now, and whether
        the load takes place outside a step. None: not known yet, ask again.

        Asked any number of times before blocks are allocated, with the same answer and no other
        effect; the request may be aborted at any time. The whole is at most all known tokens for a
        load outside a step, one less for one inside. An answer is rounded down to a length at which
        the request can go on.
        """
        ...

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A waiting request got blocks: all that it has, null ones included. The connector fills
        `num_external_tokens` of them, perhaps none. Called again with 0 when a request goes on
        after a load outside a step."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """This step's instructions for the workers' halves. Once at the end of every `schedule`,
        also of one without tokens; the argument must stay as it is."""
        ...

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers' halves report; once a step, before blocks come free."""
        ...

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must outlive the request until it is reported as sent, and parameters
        for its last output. Once for every request, whatever its end, with its final status;
        `block_ids` are those with KV, one list a group."""
        ...

    def reset_cache(self) -> bool | None:
        """Forget what is stored elsewhere; False if that is not possible now, None if nothing is
        stored."""
        ...

    def shutdown(self) -> None:
        """The engine ends."""
        ...


class ECConnector(Protocol):
    """The scheduler's half of a connector that shares encoder outputs.

    It may also have `ensure_cache_available(request, num_computed_tokens)`, asked before a request
    is admitted. False: transfers that it needs are under way, and what comes of them will be
    reported as received or failed, by identifier; until then the request waits.
    """

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the output can be loaded; fast, and without side effects."""
        ...

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """There is room for media item `index` of the request; load it."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """This step's instructions for the workers' halves."""
        ...

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """What the workers' halves report; the ids are identifiers of outputs."""
        ...

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether its encoder outputs must be kept until they are reported as sent."""
        ...

    def shutdown(self) -> None:
        """The engine ends."""
        ...
