"""Which blocks did something happen to since somebody last asked?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from jubako.kv_cache.blocks import KVCacheBlock


class RecentBlocks:
    """Blocks in order of arrival. Remembers at most `num_blocks` different ones, asked or not."""

    def __init__(self, num_blocks: int) -> None:
        self._limit = 2 * num_blocks
        self._runs: list[Sequence[KVCacheBlock]] = []
        self._num_blocks = 0

    def add(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note `blocks`, which nobody changes any more; amortised O(1) for all of them."""
        self._runs.append(blocks)
        self._num_blocks += len(blocks)
        if self._num_blocks > self._limit:
            known = list(dict.fromkeys(chain.from_iterable(self._runs)))
            self._runs, self._num_blocks = [known], len(known)

    def take(self) -> list[int]:
        """The ids since the last call, each once; then forget them."""
        blocks = dict.fromkeys(chain.from_iterable(self._runs))
        self.clear()
        return [block.block_id for block in blocks]

    def clear(self) -> None:
        """Forget them."""
        if self._runs:
            self._runs, self._num_blocks = [], 0
