"""Which encoder outputs are on their way in or out, and who waits for them?

The scheduler's view of an encoder-cache connector. An output that is loaded outside steps has its
room in the encoder cache from the beginning, so that it never arrives in vain.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from jubako.config import ECTransferConfig
from jubako.scheduler.encoder_cache import EncoderCacheManager
from jubako.scheduler.model_output import ECConnectorOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.protocols import ECConnector
from jubako.scheduler.request import Request

logger = logging.getLogger(__name__)


class EncoderTransfers:
    """Loads, outputs kept for sending, and guarded calls of the connector's scheduler half.

    An output that has not come in time is computed instead; one that has not been sent in time may
    be dropped.
    """

    def __init__(
        self, connector: ECConnector | None, cache: EncoderCacheManager, options: ECTransferConfig
    ) -> None:
        self.connector = connector
        self._cache = cache
        self._timeout = options.ec_load_timeout_s
        self._send_timeout = options.ec_send_timeout_s
        self._deadlines: dict[str, float] = {}
        """Outputs that are loaded outside steps, in the order in which they began."""
        self._waiting: dict[str, list[Request]] = {}
        """Who waits for each of them."""
        self._send_deadlines: dict[str, float] = {}
        """Outputs that are kept for sending; each has until the last that wants it is overdue."""

    @property
    def is_busy(self) -> bool:
        """Whether the workers have yet to report something."""
        return bool(self._deadlines) or self._cache.num_sending > 0

    # -- loads outside steps ------------------------------------------------------------------

    def must_wait(self, request: Request, num_computed_tokens: int, now: float) -> bool:
        """Whether transfers that the request needs are under way; if so, it is told of their end.

        `now` is in monotonic seconds.
        """
        connector = self.connector
        if connector is None or request.encodes_all or not request.mm_features:
            return False
        wanted = [
            input_id
            for input_id, feature in enumerate(request.mm_features)
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        ensure = getattr(connector, "ensure_cache_available", None)
        if ensure is not None and wanted and not ensure(request, num_computed_tokens):
            self._reserve(request, wanted, now)
        identifiers = {request.mm_features[input_id].identifier for input_id in wanted}
        under_way = identifiers & self._deadlines.keys()
        for identifier in under_way:
            self._waiting.setdefault(identifier, []).append(request)
        return bool(under_way)

    def _reserve(self, request: Request, input_ids: list[int], now: float) -> None:
        cache = self._cache
        for input_id in input_ids:
            identifier = request.mm_features[input_id].identifier
            if identifier in cache.cached:
                continue
            assert self.connector is not None
            if self.connector.has_cache_item(identifier) and cache.make_room(
                request.media_embeds[input_id]
            ):
                cache.begin_load(request, input_id)
                self._deadlines[identifier] = now + self._timeout
                self.connector.update_state_after_alloc(request, input_id)

    def take_report(self, report: ECConnectorOutput) -> list[Request]:
        """What the workers report; who need not wait any longer."""
        if self.connector is not None:
            try:
                self.connector.update_connector_output(report)
            except Exception:
                logger.exception("The encoder-cache connector failed to take the workers' report")
        woken: list[Request] = []
        for identifier in report.finished_recving or ():
            woken += self._end(identifier)
        for identifier in report.failed_recving or ():
            woken += self._give_up(identifier)
        for identifier in report.finished_sending or ():
            self._send_deadlines.pop(identifier, None)
            self._cache.release_sent(identifier)
        return woken

    def overdue(self, now: float) -> list[Request]:
        """Who has waited too long for an output; they compute it."""
        woken: list[Request] = []
        for identifier, deadline in list(self._deadlines.items()):
            if deadline > now:
                break
            woken += self._give_up(identifier)
        return woken

    def expire_sends(self, now: float) -> None:
        """Keep no longer what has not been reported as sent in time."""
        for identifier, deadline in list(self._send_deadlines.items()):
            if deadline > now:
                break
            logger.warning(
                "An encoder output was not reported as sent within %g seconds; it is kept no "
                "longer.",
                self._send_timeout,
            )
            del self._send_deadlines[identifier]
            self._cache.release_sent(identifier)

    def _end(self, identifier: str) -> list[Request]:
        self._deadlines.pop(identifier, None)
        self._cache.end_load(identifier)
        return self._waiting.pop(identifier, [])

    def _give_up(self, identifier: str) -> list[Request]:
        if identifier in self._deadlines:
            self._cache.drop(identifier)
        woken = self._end(identifier)
        for request in woken:
            request.encodes_all = True
        return woken

    # -- ends and steps -----------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        """The request has ended; outputs that are to be sent are kept."""
        sends = False
        if self.connector is not None:
            try:
                sends, _ = self.connector.request_finished(request)
            except Exception:
                logger.exception(
                    "The encoder-cache connector failed at the end of request %s",
                    request.request_id,
                )
            if sends:
                deadline = time.monotonic() + self._send_timeout
                for identifier in self._cache.keep_for_sending(request):
                    # The latest stands last.
                    self._send_deadlines.pop(identifier, None)
                    self._send_deadlines[identifier] = deadline
        self._cache.free(request)

    def build_metadata(self, output: SchedulerOutput) -> tuple[Any, bool]:
        """This step's instructions for the workers, and whether the connector could make them."""
        if self.connector is None:
            return None, True
        try:
            return self.connector.build_connector_meta(output), True
        except Exception:
            logger.exception("The encoder-cache connector failed to make its instructions")
            return None, False

    def reset(self) -> list[Request]:
        """All outputs are forgotten; who waited for one of them."""
        self._deadlines.clear()
        self._send_deadlines.clear()
        woken = [request for waiting in self._waiting.values() for request in waiting]
        self._waiting.clear()
        return woken

    def shutdown(self) -> None:
        """The engine ends."""
        if self.connector is not None:
            try:
                self.connector.shutdown()
            except Exception:
                logger.exception("The encoder-cache connector did not end well")
