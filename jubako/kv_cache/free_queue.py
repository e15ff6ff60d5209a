"""Which free block is handed out next?

A doubly linked list through the blocks themselves: any block can leave it in O(1), and no object is
ever created. The front is handed out first, and so evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.kv_cache.blocks import KVCacheBlock


class FreeKVCacheBlockQueue:
    """Free blocks, at first in the given order. A block that is not queued has both links None."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = len(blocks)
        # Sentinels: a real block always has two neighbours, so no operation has an end case.
        self.fake_free_list_head = KVCacheBlock(-1)
        self.fake_free_list_tail = KVCacheBlock(-1)
        last = self.fake_free_list_head
        for block in blocks:
            last.next_free_block = block
            block.prev_free_block = last
            last = block
        last.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = last

    def popleft(self) -> KVCacheBlock:
        """Detach the front. ValueError if there is none, RuntimeError if a link is broken."""
        block = self.fake_free_list_head.next_free_block
        if block is None or block is self.fake_free_list_tail:
            assert self.num_free_blocks == 0, f"{self.num_free_blocks} free blocks are not linked"
            raise ValueError("no free KV cache block")
        if block.next_free_block is None:
            raise RuntimeError(f"free block {block.block_id} has no next link")
        self._unlink(block)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Detach `n` from the front, in order. AssertionError if there are fewer."""
        assert n <= self.num_free_blocks, f"{n} blocks wanted, {self.num_free_blocks} are free"
        if n <= 0:
            return []
        popped = []
        block = self.fake_free_list_head.next_free_block
        for _ in range(n):
            assert block is not None, "the free list is shorter than its counter"
            popped.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None, "the free list is shorter than its counter"
        self.fake_free_list_head.next_free_block = block
        block.prev_free_block = self.fake_free_list_head
        self.num_free_blocks -= n
        return popped

    def remove(self, block: KVCacheBlock) -> None:
        """Detach `block` from wherever it is. RuntimeError if it is not queued."""
        if block.prev_free_block is None or block.next_free_block is None:
            raise RuntimeError(f"block {block.block_id} is not in the free queue")
        self._unlink(block)

    def append(self, block: KVCacheBlock) -> None:
        """Link `block` at the back. RuntimeError if the back has lost its link."""
        if self.fake_free_list_tail.prev_free_block is None:
            raise RuntimeError("the free queue's back has no link")
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Link `blocks` at the back, in the given order."""
        last = self.fake_free_list_tail.prev_free_block
        assert last is not None, "the free queue's back has no link"
        self._link(last, blocks, self.fake_free_list_tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Link `blocks` at the front, in the given order: the first is handed out next."""
        first = self.fake_free_list_head.next_free_block
        assert first is not None, "the free queue's front has no link"
        self._link(self.fake_free_list_head, blocks, first)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All blocks, front to back. O(length)."""
        blocks = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def _link(
        self, last: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock
    ) -> None:
        for block in blocks:
            last.next_free_block = block
            block.prev_free_block = last
            last = block
        last.next_free_block = after
        after.prev_free_block = last
        self.num_free_blocks += len(blocks)

    def _unlink(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"free block {block.block_id} has a broken link")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
