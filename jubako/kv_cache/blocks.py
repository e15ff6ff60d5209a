"""What is a KV cache block to the scheduler: an id, its owners, and the hash it is found by?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NewType, overload

BlockHash = NewType("BlockHash", bytes)
"""Stands for the tokens of a block and all tokens before it."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A `BlockHash` and the group whose layers' KV it finds."""

GROUP_ID_BYTES = 4
"""Of a key: the group, behind the hash."""


class KVCacheBlock:
    """One block id. `ref_cnt` counts the tables that hold it; the null block's is meaningless."""

    __slots__ = (
        "_block_hash",
        "block_id",
        "group_suffix",
        "home",
        "is_null",
        "place",
        "ref_cnt",
        "registered_by",
        "table_index",
    )

    def __init__(self, block_id: int, ref_cnt: int = 0) -> None:
        self.block_id = block_id
        self.ref_cnt = ref_cnt
        self.is_null = False
        # The two parts of `block_hash`. All groups share the first, so no key need be made.
        self._block_hash: BlockHash | None = None
        self.group_suffix = b""
        # Of the last time it became findable: the request, and the entry of its table.
        self.registered_by = ""
        self.table_index = 0
        self.home: object = None
        """The pool that it belongs to."""
        self.place = -1
        """Owned by the free queue: where it was queued last."""

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """Set only while the block is full and findable. AssertionError if set over another."""
        if self._block_hash is None:
            return None
        return BlockHashWithGroupId(self._block_hash + self.group_suffix)

    @block_hash.setter
    def block_hash(self, block_hash: BlockHashWithGroupId) -> None:
        assert self._block_hash is None, f"block {self.block_id} already has a hash"
        self._block_hash = BlockHash(block_hash[:-GROUP_ID_BYTES])
        self.group_suffix = block_hash[-GROUP_ID_BYTES:]

    def reset_hash(self) -> None:
        self._block_hash = None

    def __repr__(self) -> str:
        key = self.block_hash
        block_hash = None if key is None else key.hex()
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={block_hash})"


@dataclass(slots=True)
class KVCacheBlocks:
    """Blocks of a request: `blocks[g][j]` is entry j of group g."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """The groups' lists, each followed by that of `other`."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return KVCacheBlocks(tuple([*mine, *theirs] for mine, theirs in pairs))

    @property
    def is_empty(self) -> bool:
        """True if no group has a block."""
        return not any(self.blocks)

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids for each group; None if that is allowed and there are none."""
        if allow_none and self.is_empty:
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of blocks without a hash, null ones too. AssertionError with more than one group."""
        assert len(self.blocks) == 1, f"one group only, not {len(self.blocks)}"
        return [block.block_id for block in self.blocks[0] if block._block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of real blocks without a hash, for each group."""
        return [
            [block.block_id for block in group if block._block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """As many groups, no blocks."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))
