"""How much of a request's KV can be had elsewhere, and can the request go on from there?

What a connector answers is cut to a length at which the request can go on. What it raises is
logged, and counts as nothing found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from jubako.kv_cache import KVCacheBlocks, KVCacheManager
from jubako.scheduler.connector_calls import ConnectorCalls
from jubako.scheduler.protocols import GroupMatch, KVConnector
from jubako.scheduler.request import Request

logger = logging.getLogger(__name__)


class Match(NamedTuple):
    """Tokens beyond the local ones, and whether they come outside a step."""

    num_tokens: int = 0
    is_async: bool = False
    blocks: KVCacheBlocks | None = None
    """The request's tables with what is here and null where the connector brings a block; None:
    what was found here for all groups together."""


_NOTHING = Match()


class ExternalLookup:
    """Asks the connector.

    `alignment` tokens is the only granularity at which a request can go on, apart from its end and
    from the length of a hand-over. A recurrent group cannot step back by a token, so with one
    (`has_recurrent`) at least one token stays to be computed.
    """

    def __init__(
        self,
        calls: ConnectorCalls,
        manager: KVCacheManager,
        *,
        alignment: int,
        has_recurrent: bool,
    ) -> None:
        self._calls = calls
        self._manager = manager
        self._alignment = alignment
        self._has_recurrent = has_recurrent
        self._lookup_groups: Callable[..., GroupMatch | None] | None = None
        if manager.num_kv_cache_groups > 1:
            self._lookup_groups = getattr(calls.connector, "lookup_groups", None)
        self.asked_since: dict[str, float] = {}
        """When requests were first asked about that have no answer yet, in monotonic seconds."""
        self._violation_told = False

    def find(self, request: Request, num_local: int, now: float) -> Match | None:
        """What there is beyond `num_local` tokens; None: not known yet."""
        connector = self._calls.connector
        if connector is None or request.skip_reading_prefix_cache or request.num_failed_loads:
            return _NOTHING
        try:
            answer = self._ask_for(request, num_local, connector)
        except Exception:
            logger.exception("The KV connector failed to look up request %s", request.request_id)
            return _NOTHING
        if answer is None:
            return self._wait_for_answer(request, now)
        self.asked_since.pop(request.request_id, None)
        if isinstance(answer, GroupMatch):
            return self._match_groups(request, num_local, answer)
        return self._match_tokens(request, num_local, *answer)

    def _ask_for(
        self, request: Request, num_local: int, connector: KVConnector
    ) -> GroupMatch | tuple[int, bool] | None:
        """The connector's answer, of one of the two kinds; None: it does not know yet."""
        if self._lookup_groups is not None:
            return self._lookup_groups(request, self._manager.get_local_blocks(request))
        matched, is_async = connector.get_num_new_matched_tokens(request, num_local)
        return None if matched is None else (matched, is_async)

    def _wait_for_answer(self, request: Request, now: float) -> Match | None:
        since = self.asked_since.setdefault(request.request_id, now)
        if now - since < self._calls.options.kv_lookup_timeout_s:
            return None
        self._calls.if_there("cancel_lookup", request)
        return _NOTHING

    def _match_tokens(
        self, request: Request, num_local: int, matched: int, is_async: bool
    ) -> Match:
        if matched < 0 or (is_async and matched == 0):
            self._tell_violation(f"({matched}, {is_async}), which has no meaning")
            return _NOTHING
        matched = self._legal(request, num_local, matched, is_async)
        return Match(matched, is_async and matched > 0)

    def _match_groups(self, request: Request, num_local: int, answer: GroupMatch) -> Match:
        num_external = self._legal(
            request, num_local, max(answer.num_tokens - num_local, 0), answer.is_async
        )
        if num_external == 0:
            return _NOTHING
        total = num_local + num_external
        # With everything loaded the last token is computed again, and needs what it reads.
        resume = total - (answer.is_async and total == request.num_tokens)
        groups = self._manager.get_local_blocks(request)
        if len(answer.load) != len(groups):
            self._tell_violation(f"{answer}, although there are {len(groups)} groups")
            return _NOTHING
        for group, brought in zip(groups, answer.load):
            if not all(any(i in ids for ids in brought) for i in group.missing(resume)):
                self._tell_violation(f"{answer}, which leaves out blocks that are not here")
                return _NOTHING
        blocks = KVCacheBlocks(tuple(group.entries(resume) for group in groups))
        return Match(num_external, answer.is_async, blocks)

    def _tell_violation(self, answer: str) -> None:
        if not self._violation_told:
            self._violation_told = True
            logger.error(
                "%s answered a lookup with %s; it counts as nothing.",
                type(self._calls.connector).__name__,
                answer,
            )

    def _legal(self, request: Request, num_local: int, matched: int, is_async: bool) -> int:
        """Cut an answer to the longest one with which the request can go on."""
        at_most = request.num_tokens
        if self._has_recurrent or not is_async:
            at_most -= 1
        total = min(num_local + matched, at_most)
        if total == request.num_tokens:
            return total - num_local
        legal = total // self._alignment * self._alignment
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_prefill"):
            exported = request.num_prompt_tokens - self._has_recurrent
            if exported <= total:
                legal = max(legal, exported)
        return max(legal - num_local, 0)
