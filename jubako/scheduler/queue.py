"""In which order do requests wait, and how does one leave from the middle?"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from jubako.scheduler.request import Request

COMPACT_MIN_ENTRIES = 64
"""A heap with fewer dead entries than this is never rebuilt."""


class RequestQueue(ABC):
    """Waiting requests, most urgent first. Iterating does not change the queue."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Put in a request that arrives."""

    @abstractmethod
    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests that had left the queue, most urgent first, before those that wait."""

    @abstractmethod
    def peek(self) -> Request:
        """The most urgent request; IndexError when empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Take out the most urgent request; IndexError when empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out from anywhere; KeyError when it is not here."""

    @abstractmethod
    def __contains__(self, request: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @abstractmethod
    def first(self, count: int) -> list[Request]:
        """The `count` most urgent requests, in order."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served; every operation on one request is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in reversed(list(requests)):
            self._requests[request.request_id] = request
            self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        for request in self._requests.values():
            return request
        raise IndexError("no request is waiting")

    def pop(self) -> Request:
        if not self._requests:
            raise IndexError("no request is waiting")
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def first(self, count: int) -> list[Request]:
        return [request for _, request in zip(range(count), self, strict=False)]


class PriorityRequestQueue(RequestQueue):
    """Lowest `(priority, arrival_time, request_id)` first; O(log n).

    A removed request stays in the heap as a dead entry until it comes up, or until dead entries
    outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], int]] = []
        self._requests: dict[int, Request] = {}
        self._entry_of: dict[str, int] = {}
        self._next_entry = 0

    def add(self, request: Request) -> None:
        entry = self._next_entry
        self._next_entry += 1
        self._requests[entry] = request
        self._entry_of[request.request_id] = entry
        heapq.heappush(self._heap, (request.order_key, entry))

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add(request)

    def _drop_dead_head(self) -> None:
        while self._heap and self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)

    def peek(self) -> Request:
        self._drop_dead_head()
        return self._requests[self._heap[0][1]]

    def pop(self) -> Request:
        self._drop_dead_head()
        request = self._requests.pop(heapq.heappop(self._heap)[1])
        del self._entry_of[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._requests[self._entry_of.pop(request.request_id)]
        dead = len(self._heap) - len(self._requests)
        if dead > COMPACT_MIN_ENTRIES and dead > len(self._requests):
            self._heap = [item for item in self._heap if item[1] in self._requests]
            heapq.heapify(self._heap)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._entry_of

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values()))

    def first(self, count: int) -> list[Request]:
        # Best-first search of the heap: no entry comes before its parent, so the cost depends on
        # `count` and the dead entries near the head, not on how many requests wait.
        found: list[Request] = []
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier and len(found) < count:
            (_, entry), place = heapq.heappop(frontier)
            if entry in self._requests:
                found.append(self._requests[entry])
            for child in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                heapq.heappush(frontier, (self._heap[child], child))
        return found


def create_request_queue(policy: str) -> RequestQueue:
    """The queue of a `scheduling_policy`."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
