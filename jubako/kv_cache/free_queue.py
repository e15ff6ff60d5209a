"""Which free block is handed out next?

A line of blocks, the front of which is handed out first, and so evicted first. A run of blocks is
cut from it as a whole. A block that leaves from the middle leaves a gap, which is passed over when
its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jubako.kv_cache.blocks import KVCacheBlock

_SLACK = 64
"""Places that are not worth tidying up."""


class FreeKVCacheBlockQueue:
    """Free blocks, at first in the given order. Every operation is O(1) a block, amortised."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = len(blocks)
        self._line: list[KVCacheBlock | None] = list(blocks)
        self._front = 0
        """The index in the line from which on blocks are queued."""
        self._first_place = 0
        """Of index 0: a block knows its place, which stays while the line is cut."""
        self._num_gaps = 0
        """Behind the front."""
        self._number(blocks, 0)

    def popleft(self) -> KVCacheBlock:
        """Detach the front. ValueError if there is none."""
        if not self.num_free_blocks:
            raise ValueError("no free KV cache block")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Detach `n` from the front, in order. AssertionError if there are fewer."""
        assert n <= self.num_free_blocks, f"{n} blocks wanted, {self.num_free_blocks} are free"
        start = self._front
        stop = start + n
        popped = self._line[start:stop]
        # A block is always true: `all` asks without comparing each with None.
        if not all(popped):
            found = [block for block in popped if block is not None]
            while len(found) < n and stop < len(self._line):
                more = self._line[stop : stop + n - len(found)]
                stop += len(more)
                found += [block for block in more if block is not None]
            self._num_gaps -= stop - start - len(found)
            popped = found  # type: ignore[assignment]
        assert len(popped) == n, "the free queue is shorter than its counter"
        self._front = stop
        self.num_free_blocks -= n
        if stop > _SLACK + len(self._line) // 2:
            del self._line[:stop]
            self._first_place += stop
            self._front = 0
        return popped  # type: ignore[return-value]

    def remove(self, block: KVCacheBlock) -> None:
        """Detach `block` from wherever it is. RuntimeError if it is not queued."""
        index = block.place - self._first_place
        if not (self._front <= index < len(self._line) and self._line[index] is block):
            raise RuntimeError(f"block {block.block_id} is not in the free queue")
        self._line[index] = None
        self._num_gaps += 1
        self.num_free_blocks -= 1
        if self._num_gaps > _SLACK + self.num_free_blocks:
            self._close_gaps()

    def append(self, block: KVCacheBlock) -> None:
        """Queue `block` at the back."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Queue `blocks` at the back, in the given order."""
        self._number(blocks, self._first_place + len(self._line))
        self._line += blocks
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Queue `blocks` at the front, in the given order: the first is handed out next."""
        missing = len(blocks) - self._front
        if missing > 0:
            # As much room again as the line has: then it is moved rarely.
            room = missing + len(self._line)
            self._line[:0] = [None] * room
            self._first_place -= room
            self._front += room
        start = self._front - len(blocks)
        self._line[start : self._front] = blocks
        self._front = start
        self._number(blocks, self._first_place + start)
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All blocks, front to back. O(length)."""
        return [block for block in self._line[self._front :] if block is not None]

    def _close_gaps(self) -> None:
        blocks = self.get_all_free_blocks()
        self._line = list(blocks)
        self._front = self._num_gaps = 0
        self._number(blocks, self._first_place)

    def _number(self, blocks: Iterable[KVCacheBlock], place: int) -> None:
        for block in blocks:
            block.place = place
            place += 1
