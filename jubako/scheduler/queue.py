"""In which order do requests wait, and how does one leave from the middle?"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from jubako.scheduler.request import Request

COMPACT_MIN_ENTRIES = 64
"""A heap with fewer dead entries than this is never rebuilt."""


class RequestQueue(ABC):
    """Waiting requests, most urgent first; O(log n) for each that comes or goes.

    A blocked request waits for an event: it keeps its place, but only counting and iterating
    meet it. Iterating does not change the queue.

    A request that is not offered any more stays in the heap as a dead entry until it comes up, or
    until dead entries outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int]] = []
        self._ready: dict[int, Request] = {}
        self._entry_of: dict[str, int] = {}
        self._blocked: dict[str, tuple[Any, Request]] = {}
        self._keys: dict[str, Any] = {}
        self._next_entry = 0

    @abstractmethod
    def _arrival_key(self, request: Request) -> Any:
        """The place of a request that arrives; lower is sooner."""

    @abstractmethod
    def _return_key(self, request: Request) -> Any:
        """The place of a request that comes back before all that wait."""

    def _insert(self, request: Request, key: Any) -> None:
        entry = self._next_entry
        self._next_entry += 1
        self._ready[entry] = request
        self._entry_of[request.request_id] = entry
        self._keys[request.request_id] = key
        heapq.heappush(self._heap, (key, entry))

    def add(self, request: Request) -> None:
        """Put in a request that arrives."""
        self._insert(request, self._arrival_key(request))

    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests that had left the queue, most urgent first, before those that wait."""
        for request in reversed(list(requests)):
            self._insert(request, self._return_key(request))

    def _drop_dead_head(self) -> None:
        while self._heap and self._heap[0][1] not in self._ready:
            heapq.heappop(self._heap)

    def peek(self) -> Request:
        """The most urgent request that is not blocked; IndexError when there is none."""
        self._drop_dead_head()
        return self._ready[self._heap[0][1]]

    def pop(self) -> Request:
        """Take out the most urgent request that is not blocked; IndexError if there is none."""
        self._drop_dead_head()
        request = self._ready.pop(heapq.heappop(self._heap)[1])
        del self._entry_of[request.request_id], self._keys[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a request out from anywhere; KeyError when it is not here."""
        request_id = request.request_id
        del self._keys[request_id]
        if self._blocked.pop(request_id, None) is None:
            self._withdraw(request_id)

    def _withdraw(self, request_id: str) -> None:
        del self._ready[self._entry_of.pop(request_id)]
        dead = len(self._heap) - len(self._ready)
        if dead > COMPACT_MIN_ENTRIES and dead > len(self._ready):
            self._heap = [item for item in self._heap if item[1] in self._ready]
            heapq.heapify(self._heap)

    def block(self, request: Request) -> None:
        """Offer a request no more until `unblock`; KeyError when it is not here."""
        request_id = request.request_id
        key = self._keys[request_id]
        if request_id not in self._blocked:
            self._withdraw(request_id)
            self._blocked[request_id] = key, request

    def unblock(self, request: Request) -> None:
        """Offer a blocked request again, at its old place; others are left as they are."""
        blocked = self._blocked.pop(request.request_id, None)
        if blocked is not None:
            self._insert(request, blocked[0])

    @property
    def has_ready(self) -> bool:
        """Whether some request is not blocked."""
        return bool(self._ready)

    def is_blocked(self, request: Request) -> bool:
        """Whether the request waits here for an event."""
        return request.request_id in self._blocked

    def place(self, request: Request) -> Any:
        """Sorts requests that are here; lower is sooner."""
        return self._keys[request.request_id]

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        entries = [(key, entry) for key, entry in self._heap if entry in self._ready]
        everybody = [(key, self._ready[entry]) for key, entry in entries]
        everybody += self._blocked.values()
        return iter([request for _, request in sorted(everybody, key=lambda item: item[0])])

    def first(self, count: int) -> list[Request]:
        """The `count` most urgent requests that are not blocked, in order."""
        # Best-first search of the heap: no entry comes before its parent, so the cost depends on
        # `count` and the dead entries near the head, not on how many requests wait.
        found: list[Request] = []
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier and len(found) < count:
            (_, entry), place = heapq.heappop(frontier)
            if entry in self._ready:
                found.append(self._ready[entry])
            for child in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                heapq.heappush(frontier, (self._heap[child], child))
        return found


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._first = self._last = 0

    def _arrival_key(self, request: Request) -> int:
        self._last += 1
        return self._last

    def _return_key(self, request: Request) -> int:
        self._first -= 1
        return self._first


class PriorityRequestQueue(RequestQueue):
    """Lowest `(priority, arrival_time, request_id)` first."""

    def _arrival_key(self, request: Request) -> tuple[int, float, str]:
        return request.order_key

    def _return_key(self, request: Request) -> tuple[int, float, str]:
        return request.order_key


def create_request_queue(policy: str) -> RequestQueue:
    """The queue of a `scheduling_policy`."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
