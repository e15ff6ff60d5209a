"""How does a request end: by itself, from outside, or by a fault of its own?

Whatever it held is given back at once, but for blocks that a transfer still reads or writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from jubako.errors import JubakoError
from jubako.scheduler.engine_output import EngineCoreOutput, FinishReason
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)


class Ends(SchedulerState):
    """Takes requests out of whatever they are in."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> None:
        """End requests from outside; None means all. Unknown and ended ids are ignored.

        No output is made for them.
        """
        assert finished_status.is_finished, finished_status
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ending = {
            request_id: request
            for request_id in request_ids
            if (request := self.requests.get(request_id)) is not None
        }
        if not ending:
            return
        running = [r for r in ending.values() if r.status is RequestStatus.RUNNING]
        if len(running) == 1:
            self.running.remove(running[0])
        elif running:
            gone = set(running)
            self.running = [request for request in self.running if request not in gone]
        for request in ending.values():
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove(request)
            request.status = finished_status
            self._free_request(request)

    def _free_request(self, request: Request) -> dict[str, Any] | None:
        """Forget a request that has ended and left its queue; parameters for its last output."""
        request_id = request.request_id
        reasons, transfer_params = self.transfers.finish(request)
        self._end_load_of(request_id)
        self.encoder_transfers.finish(request)
        if self.structured_output_manager is not None and request.uses_grammar:
            try:
                self.structured_output_manager.release(request)
            except Exception:
                logger.exception("The grammar of request %s was not released", request_id)
        if reasons:
            self.transfers.hold(request, reasons)
        else:
            self.kv_cache_manager.free(request)
        self._leave_running(request)
        self.adapters.end(request)
        self._holders.pop(request_id, None)
        self._parked.discard(request_id)
        self._cut_back_ids.discard(request_id)
        self.finished_req_ids.add(request_id)
        if self._finished_by_client is not None:
            self._finished_by_client.setdefault(request.client_index, set()).add(request_id)
        del self.requests[request_id]
        return transfer_params

    def _fail_with(self, request: Request, error: Exception) -> None:
        """End one request because of an exception; the others go on."""
        if isinstance(error, JubakoError):
            message = error.message
        else:
            logger.error("Request %s failed", request.request_id, exc_info=error)
            message = "The request failed inside the engine."
        self._fail(request, message)

    def _fail(self, request: Request, message: str) -> None:
        if request.request_id not in self.requests:
            return
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED_ERROR
        if request.request_id not in self.transfers.loads:
            # What a load fills is not findable, and what was found for it is good.
            self._evict_uncomputed(request)
        self._free_request(request)
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.ERROR,
            events=request.take_events(),
            num_cached_tokens=max(request.num_cached_tokens, 0),
            error=message,
        )
        self._failed.append((request.client_index, output))
