"""What is told to the outside when blocks become findable, or stop being so?"""

from __future__ import annotations

from typing import Any

from jubako.kv_cache.blocks import BlockHash
from jubako.kv_cache.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    external_block_hash,
)
from jubako.kv_cache.hashing import ExternalBlockHash
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.request_hashing import generate_block_hash_extra_keys


class BlockAnnouncer:
    """The events of a pool that nobody has taken. `hash_block_size` is in tokens."""

    def __init__(self, hash_block_size: int, use_int_block_hashes: bool) -> None:
        self._hash_block_size = hash_block_size
        self._use_ints = use_int_block_hashes
        self.events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def cleared(self) -> None:
        """Nothing can be found any more."""
        self.events.append(AllBlocksCleared())

    def removed(self, block_hash: BlockHash, group_id: int) -> None:
        """The last block under a hash in a group is gone."""
        name = external_block_hash(block_hash, self._use_ints)
        self.events.append(BlockRemoved([name], MEDIUM_GPU, group_id))

    def stored(
        self, request: KVCacheRequest, start: int, stop: int, block_size: int, group_id: int
    ) -> None:
        """Entries `start` to `stop` of a request's table in a group can be found."""
        if start >= stop:
            return
        scale = block_size // self._hash_block_size

        def hash_of(index: int) -> ExternalBlockHash:
            block_hash = request.block_hashes[(index + 1) * scale - 1]
            return external_block_hash(block_hash, self._use_ints)

        extra_keys: list[tuple[Any, ...] | None] = []
        mm_idx = 0
        for index in range(start, stop):
            keys, mm_idx = generate_block_hash_extra_keys(
                request, index * block_size, (index + 1) * block_size, mm_idx
            )
            extra_keys.append(keys)
        lora = request.lora_request
        self.events.append(
            BlockStored(
                block_hashes=[hash_of(index) for index in range(start, stop)],
                parent_block_hash=hash_of(start - 1) if start else None,
                token_ids=list(request.all_token_ids[start * block_size : stop * block_size]),
                block_size=block_size,
                lora_id=getattr(lora, "lora_int_id", None),
                medium=MEDIUM_GPU,
                lora_name=lora.lora_name if lora else None,
                extra_keys=extra_keys,
                group_idx=group_id,
            )
        )
