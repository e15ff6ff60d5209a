"""Which blocks of a request does each group have here, whatever the other groups lack?

A joint hit is as short as its poorest group. Who can bring what is missing, from another engine or
a store, asks group by group, and need not bring again what is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.hashing import hashes_at_block_size
from jubako.kv_cache.managers import SingleTypeKVCacheManager
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.specs import cdiv


class LocalBlocks:
    """One group's cached blocks of a request, by their index in its table.

    At least the request's last token is left to compute, so a block that ends with it does not
    count. The answers hold until the pool changes.
    """

    def __init__(
        self, manager: SingleTypeKVCacheManager, pool: BlockPool, request: KVCacheRequest
    ) -> None:
        self.block_size = manager.block_size
        """Tokens in a block."""
        self._manager = manager
        self._pool = pool
        self._hashes: Sequence[BlockHash] = ()
        if manager.enable_caching:
            hashes = hashes_at_block_size(
                request.block_hashes, pool.hash_block_size, manager.block_size
            )
            self._hashes = hashes[: (request.num_tokens - 1) // manager.block_size]

    def get(self, index: int) -> KVCacheBlock | None:
        """The block with that index, if it is here."""
        if not 0 <= index < len(self._hashes):
            return None
        found = self._pool.get_cached_block(self._hashes[index], (self._manager.kv_cache_group_id,))
        return found[0] if found else None

    def __contains__(self, index: int) -> bool:
        return self.get(index) is not None

    def needed(self, num_tokens: int) -> range:
        """The blocks that a request reads which goes on behind its first `num_tokens` tokens."""
        skipped = max(self._manager.get_num_skipped_tokens(num_tokens), 0)
        return range(skipped // self.block_size, cdiv(num_tokens, self.block_size))

    def missing(self, num_tokens: int) -> list[int]:
        """Those of them that are not here. One that `num_tokens` ends inside of must be brought:
        the request will write the rest of it, and nobody may write to a shared block."""
        return [
            index for index in self.needed(num_tokens) if self._usable(index, num_tokens) is None
        ]

    def entries(self, num_tokens: int) -> list[KVCacheBlock]:
        """A table for `num_tokens` tokens, null where a block is not needed or not here."""
        needed = self.needed(num_tokens)
        table = [self._pool.null_block] * needed.stop
        for index in needed:
            block = self._usable(index, num_tokens)
            if block is not None:
                table[index] = block
        return table

    def _usable(self, index: int, num_tokens: int) -> KVCacheBlock | None:
        return self.get(index) if (index + 1) * self.block_size <= num_tokens else None
