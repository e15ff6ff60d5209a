"""Which blocks did something happen to since somebody last asked?"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.kv_cache.blocks import KVCacheBlock


class RecentBlocks:
    """Blocks in order of arrival. Remembers at most `num_blocks` different ones, asked or not."""

    def __init__(self, num_blocks: int) -> None:
        self._limit = 2 * num_blocks
        self._blocks: list[KVCacheBlock] = []

    def add(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note `blocks`; amortised O(1) a block."""
        self._blocks += blocks
        if len(self._blocks) > self._limit:
            self._blocks = list(dict.fromkeys(self._blocks))

    def take(self) -> list[int]:
        """The ids since the last call, each once; then forget them."""
        blocks, self._blocks = self._blocks, []
        return list(dict.fromkeys(block.block_id for block in blocks))

    def clear(self) -> None:
        """Forget them."""
        if self._blocks:
            self._blocks = []
