"""When may a request go on that waits for an event?

A blocked request costs nothing until something happens to it: its grammar is compiled, its load is
reported, an adapter's place comes free, the next piece of its input arrives. Whoever hears of that
notes the request, and the next step looks at it.
"""

from __future__ import annotations

import logging

from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.sessions import Sessions

logger = logging.getLogger(__name__)


class Waking(Sessions):
    """Looks at requests to which something has happened; they come before admissions."""

    def _wake_blocked(self, now: float) -> None:
        """Let those go on whose event has come. `now` is in monotonic seconds."""
        if self.transfers.loads:
            self._give_up_overdue_loads(now)
        if self.encoder_transfers.is_busy:
            self._note(self.encoder_transfers.overdue(now))
        self._note_ready_grammars()
        woken, self._woken = self._woken, {}
        for request_id in woken:
            request = self.requests.get(request_id)
            if request is None or request.awaits_admission:
                continue
            try:
                if self._is_unblocked(request):
                    self.waiting.unblock(request)
            except Exception as error:
                self._fail_with(request, error)
        for request in self.adapters.to_wake(self.waiting.place):
            self.waiting.unblock(request)

    def _note_ready_grammars(self) -> None:
        take_ready = getattr(self.structured_output_manager, "take_ready", None)
        if take_ready is None:
            return
        try:
            for request_id in take_ready():
                self._woken[request_id] = None
        except Exception:
            logger.exception("The grammars that are ready are not known")

    def _is_unblocked(self, request: Request) -> bool:
        """Whether what a blocked request waited for has come; then it awaits admission."""
        status = request.status
        if status is RequestStatus.WAITING_FOR_FSM:
            return self._has_grammar(request)
        if status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            load = self.transfers.loads.get(request.request_id)
            if load is None or not load.reported:
                return False
            self._finish_load(load)
            return True
        if status is RequestStatus.WAITING_FOR_REMOTE_EC:
            request.status = (
                RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            )
            return True
        if status is RequestStatus.WAITING_FOR_STREAMING_REQ and request.pending_pieces:
            self._continue_session(request)
        return False

    def _has_grammar(self, request: Request) -> bool:
        manager = self.structured_output_manager
        assert manager is not None
        if manager.is_ready(request):
            request.status = RequestStatus.WAITING
            return True
        if not hasattr(manager, "take_ready"):
            self._woken[request.request_id] = None
        return False
