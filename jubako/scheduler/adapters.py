"""Which adapters work now, and who waits for one of their places?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from jubako.scheduler.request import Request


class AdapterSlots:
    """Counts the different adapters of running requests; at most `limit`, None for any number."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._running: dict[int, set[str]] = {}
        """Ids of the requests that run with each adapter."""
        self._waiting: dict[str, Request] = {}
        """Requests that wait for a place."""
        self._alive: Counter[str] = Counter()
        """Requests with each adapter, by its name."""
        self._active: Counter[str] = Counter()
        """Those of them that run."""

    def arrive(self, request: Request) -> None:
        """A request has been queued."""
        if request.lora_request is not None:
            self._alive[request.lora_request.lora_name] += 1

    def end(self, request: Request) -> None:
        """A request has ended."""
        if request.lora_request is not None:
            self.release(request)
            self._waiting.pop(request.request_id, None)
            _count_down(self._alive, request.lora_request.lora_name)

    def has_place(self, request: Request) -> bool:
        """Whether the request may run without one adapter too many."""
        lora = request.lora_request
        return (
            lora is None
            or self.limit is None
            or lora.lora_int_id in self._running
            or len(self._running) < self.limit
        )

    def wait(self, request: Request) -> None:
        """The request waits until `to_wake` names it."""
        self._waiting[request.request_id] = request

    def take(self, request: Request) -> list[Request]:
        """The request runs. Who may run now as well, because it waited for the same adapter."""
        lora = request.lora_request
        if lora is None:
            return []
        self._running.setdefault(lora.lora_int_id, set()).add(request.request_id)
        self._active[lora.lora_name] += 1
        return self._stop_waiting(lora.lora_int_id)

    def release(self, request: Request) -> None:
        """The request runs no more; others are left as they are."""
        lora = request.lora_request
        if lora is None:
            return
        users = self._running.get(lora.lora_int_id, set())
        if request.request_id in users:
            users.discard(request.request_id)
            _count_down(self._active, lora.lora_name)
            if not users:
                del self._running[lora.lora_int_id]

    def to_wake(self, place: Callable[[Request], Any]) -> list[Request]:
        """Who need not wait any longer: the first by `place`, and those with its adapter."""
        if not self._waiting or (self.limit is not None and len(self._running) >= self.limit):
            return []
        first = min(self._waiting.values(), key=place)
        assert first.lora_request is not None
        return self._stop_waiting(first.lora_request.lora_int_id)

    def _stop_waiting(self, lora_int_id: int) -> list[Request]:
        if not self._waiting:
            return []
        woken = [
            request
            for request in self._waiting.values()
            if request.lora_request is not None and request.lora_request.lora_int_id == lora_int_id
        ]
        for request in woken:
            del self._waiting[request.request_id]
        return woken

    @property
    def num_running(self) -> dict[str, int]:
        """Running requests with each adapter, by its name."""
        return dict(self._active)

    @property
    def num_waiting(self) -> dict[str, int]:
        """Waiting requests with each adapter, by its name."""
        return dict(self._alive - self._active)


def _count_down(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
