"""Which block holds the KV that a hash stands for?

Two requests may compute the same block at the same time. Both copies are kept under the key rather
than merged: merging would rewrite an id in a table that the worker already has.
"""

from __future__ import annotations

from jubako.kv_cache.blocks import BlockHashWithGroupId, KVCacheBlock

Entry = KVCacheBlock | dict[int, KVCacheBlock]


class BlockHashToBlockMap:
    """Key to one block, or to a dict of blocks by id once two share the key. `len` counts keys."""

    def __init__(self) -> None:
        # A block on its own spares the dict that nearly no key needs.
        self._cache: dict[BlockHashWithGroupId, Entry] = {}

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, key: BlockHashWithGroupId) -> bool:
        return key in self._cache

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The oldest block under `key`, or None."""
        entry = self._cache.get(key)
        if entry is None or isinstance(entry, KVCacheBlock):
            return entry
        assert isinstance(entry, dict), f"{type(entry).__name__} in the block map"
        return next(iter(entry.values()))

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> bool:
        """Add `block` under `key`; True if it is the first there."""
        entry = self._cache.setdefault(key, block)
        if entry is block:
            return True
        if isinstance(entry, KVCacheBlock):
            self._cache[key] = {entry.block_id: entry, block.block_id: block}
        else:
            assert isinstance(entry, dict), f"{type(entry).__name__} in the block map"
            entry[block.block_id] = block
        return False

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Remove that id under that key and return it; None, and no change, if it is not there."""
        entry = self._cache.get(key)
        if entry is None:
            return None
        if isinstance(entry, KVCacheBlock):
            if entry.block_id != block_id:
                return None
            del self._cache[key]
            return entry
        assert isinstance(entry, dict), f"{type(entry).__name__} in the block map"
        block = entry.pop(block_id, None)
        if not entry:
            del self._cache[key]
        return block
