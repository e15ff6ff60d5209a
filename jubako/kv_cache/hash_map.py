"""Which block holds the KV that a hash stands for?

Two requests may compute the same block at the same time. Both copies are kept under the key rather
than merged: merging would rewrite an id in a table that the worker already has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jubako.kv_cache.blocks import (
    GROUP_ID_BYTES,
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
)
from jubako.kv_cache.hashing import get_block_hash

Entry = KVCacheBlock | dict[int, KVCacheBlock]

_FIRST_CHUNK = 32


class BlockHashToBlockMap:
    """Key to one block, or to a dict of blocks by id once two share the key. `len` counts keys."""

    def __init__(self) -> None:
        # A map for each group: then the groups share one hash object, and the keys need not exist.
        self._groups: dict[bytes, dict[BlockHash, Entry]] = {}
        self._num_shared = 0
        """Keys that have a dict of blocks; a block on its own spares the dict that nearly no key
        needs."""

    def of_group(self, suffix: bytes) -> dict[BlockHash, Entry]:
        """The entries of one group by block hash. Whoever inserts with `setdefault`, and does not
        get the own block back, calls `add_copy`."""
        entries = self._groups.get(suffix)
        if entries is None:
            entries = self._groups[suffix] = {}
        return entries

    def clear(self) -> None:
        """Forget all keys."""
        for entries in self._groups.values():
            entries.clear()
        self._num_shared = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __contains__(self, key: BlockHashWithGroupId) -> bool:
        return get_block_hash(key) in self.of_group(key[-GROUP_ID_BYTES:])

    def items(self) -> Iterator[tuple[BlockHashWithGroupId, list[KVCacheBlock]]]:
        """All keys, each with its blocks, the oldest first."""
        for suffix, entries in self._groups.items():
            for block_hash, entry in entries.items():
                blocks = [entry] if isinstance(entry, KVCacheBlock) else list(entry.values())
                yield BlockHashWithGroupId(block_hash + suffix), blocks

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The oldest block under `key`, or None."""
        return self.get_oldest(get_block_hash(key), key[-GROUP_ID_BYTES:])

    def get_oldest(self, block_hash: BlockHash, suffix: bytes) -> KVCacheBlock | None:
        """`get_one_block` for a key in two parts."""
        entry = self.of_group(suffix).get(block_hash)
        if entry is None or isinstance(entry, KVCacheBlock):
            return entry
        return next(iter(_copies(entry).values()))

    def get_run(
        self, block_hashes: Sequence[BlockHash], start: int, stop: int, suffix: bytes
    ) -> list[KVCacheBlock]:
        """The oldest blocks of hashes `start` to `stop` of one group, up to the first without."""
        get = self.of_group(suffix).get
        stop = min(stop, len(block_hashes))
        run: list[KVCacheBlock] = []
        # Whole chunks are looked up without a loop in Python; they grow, so that little is looked
        # up beyond the end of a short run. Most runs that end early end at once.
        size = 1
        while start < stop:
            entries = list(map(get, block_hashes[start : min(start + size, stop)]))
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
        return self.add(get_block_hash(key), key[-GROUP_ID_BYTES:], block)

    def add(self, block_hash: BlockHash, suffix: bytes, block: KVCacheBlock) -> bool:
        """`insert` under a key in two parts."""
        entries = self.of_group(suffix)
        if entries.setdefault(block_hash, block) is block:
            return True
        self.add_copy(entries, block_hash, block)
        return False

    def add_all(
        self, block_hashes: Sequence[BlockHash], suffix: bytes, blocks: list[KVCacheBlock]
    ) -> None:
        """`add` for each hash and block, without a loop in Python where all are new."""
        entries = self.of_group(suffix)
        present = list(map(entries.setdefault, block_hashes, blocks))
        if present != blocks:
            for block_hash, block, entry in zip(block_hashes, blocks, present):
                if entry is not block:
                    self.add_copy(entries, block_hash, block)

    def add_copy(
        self, entries: dict[BlockHash, Entry], block_hash: BlockHash, block: KVCacheBlock
    ) -> None:
        """Add `block` under a hash that has another block already in its group."""
        entry = entries[block_hash]
        if isinstance(entry, KVCacheBlock):
            entries[block_hash] = {entry.block_id: entry, block.block_id: block}
            self._num_shared += 1
        else:
            _copies(entry)[block.block_id] = block

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Remove that id under that key and return it; None, and no change, if it is not there."""
        return self.take(get_block_hash(key), key[-GROUP_ID_BYTES:], block_id)

    def take(self, block_hash: BlockHash, suffix: bytes, block_id: int) -> KVCacheBlock | None:
        """`pop` under a key in two parts."""
        entries = self.of_group(suffix)
        entry = entries.get(block_hash)
        if entry is None:
            return None
        if isinstance(entry, KVCacheBlock):
            if entry.block_id != block_id:
                return None
            del entries[block_hash]
            return entry
        block = _copies(entry).pop(block_id, None)
        if not entry:
            del entries[block_hash]
            self._num_shared -= 1
        return block


def _copies(entry: object) -> dict[int, KVCacheBlock]:
    assert isinstance(entry, dict), f"{type(entry).__name__} in the block map"
    return entry
