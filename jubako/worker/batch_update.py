"""Which rows of the batch were freed, filled and moved in this step?"""

from __future__ import annotations

import heapq

from jubako.sampling.logits_processors import AddedRow, BatchUpdate, Move, MoveDirectionality


class BatchUpdateBuilder:
    """Collects a step's changes. All removals come before the first addition."""

    def __init__(self) -> None:
        self._removed: list[int] = []
        """Freed rows that are still empty, a heap with the lowest first."""
        self._added: list[AddedRow] = []
        self._moved: list[Move] = []

    @property
    def removed(self) -> list[int]:
        """Freed rows that are still empty, ascending."""
        return sorted(self._removed)

    @property
    def has_changes(self) -> bool:
        """Whether anything happened since the last `take`."""
        return bool(self._removed or self._added or self._moved)

    def remove(self, row: int) -> None:
        """A row was freed."""
        assert not self._added, "rows are removed before any is added"
        heapq.heappush(self._removed, row)

    def lowest_removed(self) -> int | None:
        """The lowest freed row."""
        return self._removed[0] if self._removed else None

    def pop_removed(self) -> int:
        """Take the lowest freed row, to fill it."""
        return heapq.heappop(self._removed)

    def add(self, added: AddedRow) -> None:
        """A row was filled with a request."""
        self._added.append(added)

    def move(self, source: int, target: int) -> None:
        """The content of `source` went to `target`."""
        self._moved.append((source, target, MoveDirectionality.UNIDIRECTIONAL))

    def swap(self, first: int, second: int) -> None:
        """Two rows exchanged their contents."""
        self._moved.append((first, second, MoveDirectionality.SWAP))

    def take(self, batch_size: int) -> BatchUpdate | None:
        """What happened since the last call; None for nothing."""
        if not self.has_changes:
            return None
        update = BatchUpdate(batch_size, self.removed, tuple(self._added), tuple(self._moved))
        self._removed, self._added, self._moved = [], [], []
        return update
