"""Which blocks hold the KV that a hash stands for?

A hash has a row, with a place for each group: what a step fills in all groups is entered and found
together. Rows are kept by column, so that a run of them is cut from a list, and nothing is made for
the cycle collector to walk through.

Two requests may compute the same block at the same time. Both copies are kept rather than merged:
merging would rewrite an id in a table that the worker already has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jubako.kv_cache.blocks import (
    GROUP_ID_BYTES,
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
)
from jubako.kv_cache.hashing import get_block_hash

Column = list[KVCacheBlock | None]
"""The oldest block of one group in each row; None where the group has none."""

_FIRST_CHUNK = 32
_MORE_ROWS = 64
"""Least number of rows that are made at once."""


class BlockHashToBlockMap:
    """Key to its blocks, the oldest first. `len` counts keys, each a hash and a group."""

    def __init__(self) -> None:
        self._rows: dict[BlockHash, int] = {}
        self._columns: dict[bytes, Column] = {}
        """By the group's suffix, in the order in which the groups came."""
        self._free_rows: list[int] = []
        """Empty ones; the last is used next. A prompt is forgotten from its end, so its rows are
        mostly used again in ascending order."""
        self._num_rows = 1
        """In use or not. The first stays empty, so that a row is always true."""
        self._copies: dict[BlockHashWithGroupId, dict[int, KVCacheBlock]] = {}
        """What came under a key after its oldest block, by id."""

    def column_of(self, suffix: bytes) -> Column:
        """The column of a group, which may be a new one."""
        column = self._columns.get(suffix)
        if column is None:
            column = self._columns[suffix] = [None] * self._num_rows
        return column

    def clear(self) -> None:
        """Forget all keys."""
        self._rows.clear()
        self._copies.clear()
        self._free_rows.clear()
        self._num_rows = 1
        for column in self._columns.values():
            column[:] = [None]

    def __len__(self) -> int:
        return sum(len(column) - column.count(None) for column in self._columns.values())

    def __contains__(self, key: BlockHashWithGroupId) -> bool:
        return self.get_one_block(key) is not None

    def items(self) -> Iterator[tuple[BlockHashWithGroupId, list[KVCacheBlock]]]:
        """All keys, each with its blocks, the oldest first."""
        for block_hash, row in self._rows.items():
            for suffix, column in self._columns.items():
                oldest = column[row]
                if oldest is not None:
                    key = BlockHashWithGroupId(block_hash + suffix)
                    yield key, [oldest, *self._copies.get(key, {}).values()]

    # Lookup

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The oldest block under `key`, or None."""
        return self.get_oldest(get_block_hash(key), key[-GROUP_ID_BYTES:])

    def get_oldest(self, block_hash: BlockHash, suffix: bytes) -> KVCacheBlock | None:
        """`get_one_block` for a key in two parts."""
        row = self._rows.get(block_hash)
        return None if row is None else self.column_of(suffix)[row]

    def get_run(
        self, block_hashes: Sequence[BlockHash], start: int, stop: int, suffixes: Sequence[bytes]
    ) -> list[list[KVCacheBlock]]:
        """For each group the oldest blocks of hashes `start` to `stop`, up to the first hash that
        any of the groups lacks."""
        rows = self._rows_of(block_hashes, start, min(stop, len(block_hashes)))
        columns = [self.column_of(suffix) for suffix in suffixes]
        if rows and _is_run(rows):
            # What was entered together mostly still stands together.
            first = rows[0]
            runs = [column[first : first + len(rows)] for column in columns]
        else:
            runs = [[column[row] for row in rows] for column in columns]
        length = len(rows)
        for run in runs:
            if not all(run):
                length = min(length, run.index(None))
        for run in runs:
            del run[length:]
        return runs  # type: ignore[return-value]

    def _rows_of(self, block_hashes: Sequence[BlockHash], start: int, stop: int) -> list[int]:
        """The rows of hashes `start` to `stop`, up to the first without."""
        get = self._rows.get
        rows: list[int] = []
        # Whole chunks are looked up without a loop in Python; they grow, so that little is looked
        # up beyond the end of a short run. Most runs that end early end at once.
        size = 1
        while start < stop:
            found = list(map(get, block_hashes[start : min(start + size, stop)]))
            # `all` asks without comparing each with None.
            if not all(found):
                rows += found[: found.index(None)]  # type: ignore[arg-type]
                break
            rows += found  # type: ignore[arg-type]
            start += size
            size = max(2 * size, _FIRST_CHUNK)
        return rows

    # Changes

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> bool:
        """Add `block` under `key`; True if it is the first there."""
        assert isinstance(block, KVCacheBlock), f"{type(block).__name__} in the block map"
        return self.add(get_block_hash(key), key[-GROUP_ID_BYTES:], block)

    def add(self, block_hash: BlockHash, suffix: bytes, block: KVCacheBlock) -> bool:
        """`insert` under a key in two parts."""
        column = self.column_of(suffix)
        row = self._rows.get(block_hash)
        if row is None:
            (row,) = self._new_rows(1)
            self._rows[block_hash] = row
        elif column[row] is not None:
            key = BlockHashWithGroupId(block_hash + suffix)
            self._copies.setdefault(key, {})[block.block_id] = block
            return False
        column[row] = block
        return True

    def add_rows(
        self, block_hashes: Sequence[BlockHash], columns: Sequence[Sequence[KVCacheBlock]]
    ) -> None:
        """`add` for each hash a block of every group, in the order in which the groups came."""
        rows = self._new_rows(len(block_hashes))
        present = list(map(self._rows.setdefault, block_hashes, rows))
        if present != rows:
            for block_hash, row, own_row, *blocks in zip(block_hashes, present, rows, *columns):
                if row != own_row:
                    self._free_rows.append(own_row)
                for suffix, block in zip(self._columns, blocks):
                    self.add(block_hash, suffix, block)
        elif _is_run(rows):
            first = rows[0]
            for column, own in zip(self._columns.values(), columns):
                column[first : first + len(rows)] = own
        else:
            for column, own in zip(self._columns.values(), columns):
                for row, block in zip(rows, own):
                    column[row] = block

    def _new_rows(self, n: int) -> list[int]:
        """Rows that are empty, and no longer free."""
        free = self._free_rows
        if len(free) < n:
            more = max(n, _MORE_ROWS, self._num_rows // 8)
            free[:0] = range(self._num_rows + more - 1, self._num_rows - 1, -1)
            self._num_rows += more
            for column in self._columns.values():
                column += [None] * more
        rows = free[-n:]
        del free[-n:]
        rows.reverse()
        return rows

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Remove that id under that key and return it; None, and no change, if it is not there."""
        return self.take(get_block_hash(key), key[-GROUP_ID_BYTES:], block_id)

    def take(self, block_hash: BlockHash, suffix: bytes, block_id: int) -> KVCacheBlock | None:
        """`pop` under a key in two parts."""
        column = self.column_of(suffix)
        row = self._rows.get(block_hash)
        if row is None:
            return None
        key = BlockHashWithGroupId(block_hash + suffix)
        copies = self._copies.get(key) if self._copies else None
        block = column[row]
        if block is None or block.block_id != block_id:
            block = copies.pop(block_id, None) if copies else None
        elif copies:
            column[row] = copies.pop(next(iter(copies)))
        else:
            column[row] = None
            if not any([c[row] for c in self._columns.values()]):  # noqa: C419 (quicker)
                del self._rows[block_hash]
                self._free_rows.append(row)
        if copies is not None and not copies:
            del self._copies[key]
        return block


def _is_run(rows: list[int]) -> bool:
    """Whether each is one more than the one before."""
    return rows == list(range(rows[0], rows[0] + len(rows)))
