"""How does the outside learn which KV blocks can be found here?

A router that replays the events holds exactly the set of findable (hash, group) pairs: a store is
announced for the first copy of a hash, a removal when the last copy goes, and a store's parent is
the true hash of the prefix before it. On the wire an event is an array that begins with its type
name; fields are only ever added at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from jubako.kv_cache.hashing import ExternalBlockHash
from jubako.kv_cache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

MEDIUM_GPU = "GPU"
"""The memory that the model computes in, whatever the device."""

_INT_HASH_BYTES = 8


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of the events below."""


class BlockStored(KVCacheEvent):
    """A run of consecutive blocks of one group became findable.

    `token_ids` are those of the run, `block_size` tokens for each hash; `extra_keys[i]` is what
    entered hash i beside tokens.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    """Deprecated: use `lora_name`."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """No block of the group is findable under these hashes any more."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """No block is findable any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events of one step; `ts` in seconds since 1970. A new `epoch` means: forget all before."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    epoch: str | None = None


def external_block_hash(block_hash: bytes, as_int: bool) -> ExternalBlockHash:
    """What events carry: the raw bytes, or their last 8 as a big-endian integer."""
    return int.from_bytes(block_hash[-_INT_HASH_BYTES:], "big") if as_int else block_hash


def spec_kind(spec: KVCacheSpec) -> str:
    """The name of an attention type in `BlockStored`."""
    if isinstance(spec, SinkFullAttentionSpec):
        return "sink_full_attention"
    if isinstance(spec, MLAAttentionSpec):
        return "mla_attention" if spec.sliding_window is None else "sliding_window_mla"
    for cls, kind in (
        (FullAttentionSpec, "full_attention"),
        (SlidingWindowSpec, "sliding_window"),
        (ChunkedLocalAttentionSpec, "chunked_local_attention"),
        (MambaSpec, "mamba"),
        (CrossAttentionSpec, "cross_attention"),
        (EncoderOnlyAttentionSpec, "encoder_only_attention"),
    ):
        if isinstance(spec, cls):
            return kind
    return "unknown"


class KVEventAggregator:
    """Which events have all workers sent? ValueError for less than one worker."""

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers is {num_workers}, but must be at least 1")
        self._num_workers = num_workers
        # Events hold lists, so their encoding is the key.
        self._encode = msgspec.msgpack.Encoder().encode
        self._counts: dict[bytes, int] = {}
        self._events: dict[bytes, Event] = {}

    def add_events(self, events: Iterable[Event]) -> None:
        """Count the events of one worker."""
        for event in events:
            key = self._encode(event)
            self._events.setdefault(key, event)
            self._counts[key] = self._counts.get(key, 0) + 1

    def get_common_events(self) -> list[Event]:
        """Events that all workers have sent, in the order of first arrival."""
        return [
            event for key, event in self._events.items() if self._counts[key] >= self._num_workers
        ]

    def get_all_events(self) -> list[Event]:
        return list(self._events.values())

    def clear_events(self) -> None:
        self._counts.clear()
        self._events.clear()

    def increment_workers(self, count: int = 1) -> None:
        if count <= 0:
            raise ValueError(f"count is {count}, but must be at least 1")
        self._num_workers += count

    def reset_workers(self) -> None:
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        return self._num_workers
