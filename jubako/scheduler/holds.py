"""Which blocks of ended requests does a transfer still read or write, and for how long may it?

Blocks that are being sent may come free when the reader has had its time: it asks whether what it
read still counted. Blocks that a load may yet write to may not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from dataclasses import dataclass

from jubako.kv_cache import BlockPool, KVCacheBlock
from jubako.scheduler.connector_calls import ConnectorCalls
from jubako.scheduler.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Hold:
    """Blocks of an ended request, in the order in which they were allocated."""

    request: Request
    blocks: list[KVCacheBlock]
    deadlines: dict[str, float]
    """Of the reports "send" and "recv" that have not come, in monotonic seconds."""
    is_cancelled: bool = False
    """Whether the end of its load has been asked for."""

    @property
    def reasons(self) -> Collection[str]:
        """The reports that have not come."""
        return self.deadlines.keys()


class BlockHolds:
    """The holds of all ended requests, and blocks that are lost for good."""

    def __init__(self, pool: BlockPool, calls: ConnectorCalls) -> None:
        self._pool = pool
        self._calls = calls
        self.of_request: dict[str, Hold] = {}
        self.quarantined: list[KVCacheBlock] = []
        """Blocks that some worker may write at any time; they are never used again."""
        self.num_expired = 0
        """Holds that ended without a report."""
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self.of_request)

    def add(self, request: Request, blocks: list[KVCacheBlock], reasons: Collection[str]) -> None:
        """Keep the blocks of an ended request until all `reasons` are reported, or overdue."""
        now = time.monotonic()
        options = self._calls.options
        seconds = {"send": options.kv_send_timeout_s, "recv": options.kv_load_timeout_s}
        deadlines = {reason: now + seconds[reason] for reason in reasons}
        self.of_request[request.request_id] = Hold(request, blocks, deadlines)
        self._next_deadline = min(self._next_deadline, *deadlines.values())

    def release(self, request_id: str, reason: str) -> bool:
        """A report has come; blocks without a reason left come free. False: nobody waits for it."""
        hold = self.of_request.get(request_id)
        if hold is None or reason not in hold.deadlines:
            return False
        del hold.deadlines[reason]
        if not hold.deadlines:
            del self.of_request[request_id]
            self._pool.free_blocks(reversed(hold.blocks))
        return True

    def expire(self, now: float) -> None:
        """End what has not been reported in time. `now` is in monotonic seconds."""
        if now < self._next_deadline:
            return
        for hold in list(self.of_request.values()):
            if hold.deadlines.get("send", math.inf) <= now:
                self._end_send(hold)
            if hold.deadlines.get("recv", math.inf) <= now:
                self._end_load(hold, now)
        deadlines = (d for hold in self.of_request.values() for d in hold.deadlines.values())
        self._next_deadline = min(deadlines, default=math.inf)

    def _end_send(self, hold: Hold) -> None:
        request = hold.request
        self.num_expired += 1
        logger.warning(
            "The KV of request %s was not reported as sent within %g seconds; its blocks are used "
            "again.",
            request.request_id,
            self._calls.options.kv_send_timeout_s,
        )
        self._calls.if_there("cancel_send", request)
        self.release(request.request_id, "send")

    def _end_load(self, hold: Hold, now: float) -> None:
        request = hold.request
        if not hold.is_cancelled:
            hold.is_cancelled = True
            hold.deadlines["recv"] = now + self._calls.options.kv_load_timeout_s
            self._calls.if_there("cancel_load", request)
            return
        self.num_expired += 1
        del self.of_request[request.request_id]
        self.quarantine(request, hold.blocks)

    def quarantine(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        """Keep blocks out of use for good: a worker that is silent may write them."""
        self.quarantined += blocks
        logger.error(
            "A load of KV for request %s was neither finished nor cancelled in time; its blocks "
            "are lost to this engine, and the worker that holds them up needs a restart.",
            request.request_id,
        )
