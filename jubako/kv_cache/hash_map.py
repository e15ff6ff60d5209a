"""Which block holds the KV that a hash stands for?

Two requests may compute the same block at the same time. Both copies are kept under the key rather
than merged: merging would rewrite an id in a table that the worker already has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jubako.kv_cache.blocks import BlockHash, BlockHashWithGroupId, KVCacheBlock

Entry = KVCacheBlock | dict[int, KVCacheBlock]

_FIRST_CHUNK = 32


class BlockHashToBlockMap:
    """Key to one block, or to a dict of blocks by id once two share the key. `len` counts keys."""

    def __init__(self) -> None:
        # A block on its own spares the dict that nearly no key needs.
        self._cache: dict[BlockHashWithGroupId, Entry] = {}
        self.add_if_first = self._cache.setdefault
        """`insert` for a key that is most likely new: anything but `block` itself in return means
        that the key has others, and that `add_copy` must follow."""
        self._num_shared = 0
        """Keys that have a dict."""

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

    def get_run(
        self, block_hashes: Sequence[BlockHash], start: int, stop: int, suffix: bytes
    ) -> list[KVCacheBlock]:
        """The oldest blocks of hashes `start` to `stop` of one group, up to the first without."""
        get = self._cache.get
        stop = min(stop, len(block_hashes))
        run: list[KVCacheBlock] = []
        # Whole chunks are looked up without a loop in Python; they grow, so that little is looked
        # up beyond the end of a short run. Most runs that end early end at once.
        size = 1
        while start < stop:
            chunk = block_hashes[start : min(start + size, stop)]
            keys = [block_hash + suffix for block_hash in chunk]
            entries = list(map(get, keys))  # type: ignore[arg-type]
            # A block is always true: `all` asks without comparing each with None.
            complete = all(entries)
            if not complete:
                del entries[entries.index(None) :]
            run += self._oldest(entries) if self._num_shared else entries  # type: ignore[arg-type]
            if not complete:
                break
            start += size
            size = max(2 * size, _FIRST_CHUNK)
        return run

    def _oldest(self, entries: Iterable[Entry | None]) -> list[KVCacheBlock]:
        return [
            entry if isinstance(entry, KVCacheBlock) else next(iter(entry.values()))
            for entry in entries
            if entry is not None
        ]

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> bool:
        """Add `block` under `key`; True if it is the first there."""
        if self._cache.setdefault(key, block) is block:
            return True
        self.add_copy(key, block)
        return False

    def insert_all(self, keys: Sequence[BlockHashWithGroupId], blocks: list[KVCacheBlock]) -> None:
        """`insert` for each key and block, without a loop in Python where all keys are new."""
        entries = list(map(self._cache.setdefault, keys, blocks))
        if entries != blocks:
            for key, block, entry in zip(keys, blocks, entries):
                if entry is not block:
                    self.add_copy(key, block)

    def add_copy(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Add `block` under `key`, which has another block already."""
        entry = self._cache[key]
        if isinstance(entry, KVCacheBlock):
            self._cache[key] = {entry.block_id: entry, block.block_id: block}
            self._num_shared += 1
        else:
            assert isinstance(entry, dict), f"{type(entry).__name__} in the block map"
            entry[block.block_id] = block

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
            self._num_shared -= 1
        return block
