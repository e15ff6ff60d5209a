"""Which KV is on its way in or out, and which blocks wait for it?

The scheduler's view of a KV connector: what it may be asked, what it has promised, and what the
workers have yet to report. Requests and their queues are nobody's business here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jubako.config import KVTransferConfig
from jubako.kv_cache import KVCacheBlocks, KVCacheManager
from jubako.kv_cache.metrics import PrefixCacheStats
from jubako.scheduler.connector_calls import ConnectorCalls
from jubako.scheduler.external_lookup import ExternalLookup
from jubako.scheduler.holds import BlockHolds
from jubako.scheduler.model_output import KVConnectorOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.protocols import KVConnector
from jubako.scheduler.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KVLoad:
    """KV that a request is waiting for, or that the step in flight loads."""

    request: Request
    num_local: int
    """Tokens that were found here."""
    num_tokens: int
    """Tokens that the request has when the load is done."""
    deadline: float
    """Monotonic seconds; only of loads outside steps."""
    computed_to: int = 0
    """Tokens at the end of the step that loads; 0 for a load outside steps."""
    hashes: list[Any] = field(default_factory=list)
    """Names of the blocks that are being loaded."""
    block_ids: set[int] = field(default_factory=set)
    """Blocks of its tokens when it began: the table may have let some go before a report."""
    reported: bool = False
    damaged: set[int] = field(default_factory=set)
    """Blocks that did not arrive."""
    failed: bool = False
    is_cancelled: bool = False
    is_untold: bool = False
    """The workers never heard of it."""
    step: SchedulerOutput | None = None
    """The step that loads it."""
    is_stale: bool = False
    """Whether its request gave way while the step was under way: only what the step brings is still
    of interest."""

    @property
    def num_external(self) -> int:
        """Tokens that come from elsewhere."""
        return self.num_tokens - self.num_local


class KVTransfers:
    """Loads, holds, and guarded calls of the connector's scheduler half.

    What the connector raises is logged; a lookup that fails has found nothing. Only
    `update_state_after_alloc` raises: its request cannot go on.
    """

    def __init__(
        self,
        connector: KVConnector | None,
        manager: KVCacheManager,
        options: KVTransferConfig,
        *,
        alignment: int,
        has_recurrent: bool,
        log_stats: bool,
    ) -> None:
        self.connector = connector
        self._manager = manager
        self.calls = ConnectorCalls(connector, options)
        self.lookup = ExternalLookup(
            self.calls,
            manager,
            alignment=alignment,
            has_recurrent=has_recurrent,
        )
        self.loads: dict[str, KVLoad] = {}
        """Loads outside steps, by request id, until the request goes on."""
        self.step_loads: dict[str, KVLoad] = {}
        """Loads inside steps whose output has not come back."""
        self.holds = BlockHolds(manager.block_pool, self.calls)
        self.num_unknown_reports = 0
        """Reports about requests or blocks that nothing is known of."""
        self.stats = PrefixCacheStats() if log_stats and connector is not None else None
        self._loading: dict[Any, str] = {}
        """Names of blocks that are being loaded, and for whom."""

    # -- lookups ------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """The connector may begin to look."""
        self.calls.if_there("on_new_request", request)

    def loaded_for(self, request: Request, num_local: int, num_external: int) -> str | None:
        """The request for which some of these tokens are being loaded already."""
        size = request.hash_block_size
        names = request.block_hashes[num_local // size : -(-(num_local + num_external) // size)]
        for name in names:
            owner = self._loading.get(name)
            if owner is not None:
                return owner
        return None

    # -- loads --------------------------------------------------------------------------------

    def tell_blocks(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """The request has blocks; `num_external` tokens of them are the connector's to fill."""
        if self.connector is not None:
            self.connector.update_state_after_alloc(request, blocks, num_external)

    def begin(
        self,
        request: Request,
        num_local: int,
        num_external: int,
        now: float,
        computed_to: int = 0,
    ) -> None:
        """A load begins; in a step that computes up to `computed_to` tokens, or outside steps."""
        self.end(request.request_id)
        deadline = now + self.calls.options.kv_load_timeout_s
        total = num_local + num_external
        load = KVLoad(request, num_local, total, deadline, computed_to)
        size = request.hash_block_size
        load.hashes = request.block_hashes[num_local // size : -(-total // size)]
        load.block_ids = self.ids_of(request, total)
        for name in load.hashes:
            self._loading.setdefault(name, request.request_id)
        (self.step_loads if computed_to else self.loads)[request.request_id] = load

    def ids_of(self, request: Request, num_tokens: int) -> set[int]:
        """Blocks of a request's first `num_tokens` tokens."""
        tables = self._manager.get_block_ids_for_computed_tokens(request.request_id, num_tokens)
        return {block_id for ids in tables for block_id in ids if block_id}

    def end(self, request_id: str) -> KVLoad | None:
        """The load of a request is over or pointless; returns it, if there was one."""
        self.lookup.asked_since.pop(request_id, None)
        load = self.loads.pop(request_id, None) or self.step_loads.pop(request_id, None)
        if load is not None:
            for name in load.hashes:
                if self._loading.get(name) == request_id:
                    del self._loading[name]
        return load

    def give_way(self, request_id: str) -> None:
        """A request gives way while a step that loads for it may be under way."""
        load = self.step_loads.get(request_id)
        if load is not None:
            load.is_stale = True

    def is_unconfirmed(self, request_id: str) -> bool:
        """Whether a step under way loads for the request."""
        load = self.step_loads.get(request_id)
        return load is not None and not load.is_stale

    def count_lookup(self, request: Request, num_local: int, num_external: int) -> None:
        """Statistics of a lookup whose request got blocks."""
        if self.stats is not None:
            preempted = request.num_preemptions > 0
            self.stats.record(request.num_tokens - num_local, num_external, preempted)

    def take_stats(self) -> PrefixCacheStats | None:
        """The statistics since the last call."""
        stats = self.stats
        if stats is not None:
            self.stats = PrefixCacheStats()
        return stats

    def overdue(self, now: float) -> list[KVLoad]:
        """Loads outside steps that have not been reported in time."""
        # They began in this order and all have the same time.
        found = []
        for load in self.loads.values():
            if load.reported:
                continue
            if load.deadline > now and not load.is_cancelled:
                break
            if load.deadline <= now:
                found.append(load)
        return found

    def cancel(self, load: KVLoad, now: float) -> None:
        """Ask for the end of a load; what arrives of it is not used."""
        load.is_cancelled = load.failed = True
        load.deadline = now + self.calls.options.kv_load_timeout_s
        self.calls.if_there("cancel_load", load.request)

    # -- ends ---------------------------------------------------------------------------------

    def finish(self, request: Request) -> tuple[set[str], dict[str, Any] | None]:
        """The request has ended, with its final status set.

        Which reports its blocks must wait for, and parameters for its last output.
        """
        if self.connector is None:
            return set(), None
        request_id = request.request_id
        reasons = set()
        load = self.end(request_id)
        if load is not None and not load.computed_to and not load.reported:
            reasons.add("recv")
        transfer_params = None
        try:
            block_ids = self._blocks_to_hand_over(request)
            sends, transfer_params = self.connector.request_finished(request, block_ids)
            if sends:
                if not reasons:
                    # What was not handed over need not wait.
                    self._manager.truncate(request_id, request.num_computed_tokens)
                reasons.add("send")
        except Exception:
            logger.exception("The KV connector failed at the end of request %s", request_id)
        return reasons, transfer_params

    def _blocks_to_hand_over(self, request: Request) -> tuple[list[int], ...]:
        """The blocks with KV, as far as a reader needs them to go on."""
        computed = request.num_computed_tokens
        params = request.kv_transfer_params
        resume_at = computed
        if params is not None and params.get("do_remote_decode"):
            resume_at = min(request.num_prompt_tokens - 1, computed)
        if resume_at > 0 and request.request_id not in self.loads:
            self._manager.remove_skipped_blocks(request.request_id, resume_at)
        return self._manager.get_block_ids_for_computed_tokens(request.request_id, computed)

    def hold(self, request: Request, reasons: set[str]) -> None:
        """Keep the blocks of an ended request until all `reasons` are reported."""
        self.holds.add(request, self._manager.pop_blocks_for_free(request), reasons)

    def release(self, request_id: str, reason: str) -> None:
        """A report has come for an ended request; blocks without a reason left come free."""
        if not self.holds.release(request_id, reason):
            self.num_unknown_reports += 1

    def quarantine(self, request: Request) -> None:
        """Keep a request's blocks out of use for good: a worker that is silent may write them."""
        self.holds.quarantine(request, self._manager.pop_blocks_for_free(request))

    @property
    def is_busy(self) -> bool:
        """Whether reports are outstanding, or the connector still has something to send."""
        if self.loads or self.holds:
            return True
        pending = getattr(self.connector, "has_pending_push_work", None)
        if pending is None:
            return False
        try:
            return bool(pending())
        except Exception:
            logger.exception("The KV connector does not know what it has to send")
            return False

    # -- steps --------------------------------------------------------------------------------

    def build_metadata(self, output: SchedulerOutput) -> tuple[Any, bool]:
        """This step's instructions for the workers, and whether the connector could make them."""
        if self.connector is None:
            return None, True
        try:
            return self.connector.build_connector_meta(output), True
        except Exception:
            logger.exception("The KV connector failed to make its instructions for a step")
            return None, False

    def update(self, report: KVConnectorOutput) -> None:
        """What the workers report."""
        if self.connector is not None:
            try:
                self.connector.update_connector_output(report)
            except Exception:
                logger.exception("The KV connector failed to take the workers' report")

    def connector_stats(self, reported: Any) -> Any:
        """The workers' statistics, with those of the scheduler's half."""
        own = self.calls.if_there("get_kv_connector_stats")
        if reported is None or own is None:
            return own if reported is None else reported
        return reported.aggregate(own) if hasattr(reported, "aggregate") else reported

    def take_events(self) -> Iterable[Any]:
        """Events of the connector since the last call."""
        return self.calls.if_there("take_events") or ()

    def reset_cache(self) -> bool:
        """Whether the connector has forgotten all it kept; True without one."""
        if self.connector is None:
            return True
        try:
            # None: it keeps nothing.
            return self.connector.reset_cache() is not False
        except Exception:
            logger.exception("The KV connector failed to forget")
            return False

    def shutdown(self) -> None:
        """The engine ends."""
        self.calls.if_there("shutdown")
