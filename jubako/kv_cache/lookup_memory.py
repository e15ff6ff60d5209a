"""Which prefix lookups need not be repeated?

A request that does not fit is looked up again in every step. Its answer stays as it was until one
of its own block hashes is registered or evicted, whatever else happens in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jubako.kv_cache.blocks import BlockHash, KVCacheBlocks
from jubako.kv_cache.request import KVCacheRequest

MAX_LOOKUPS = 32
"""More requests than a scheduler looks at before it gives up on a step."""

MAX_CHANGES = 4096


class CacheHit(NamedTuple):
    """What a request can begin with; lengths are in tokens.

    `lost` tokens more are cached in the full-attention groups, but other groups lack what they need
    to go on from there.
    """

    blocks: KVCacheBlocks
    length: int
    lost: int = 0


class _Lookup:
    __slots__ = ("hashes", "hit", "num_hashes", "num_tokens", "seen")

    def __init__(self, request: KVCacheRequest, hit: CacheHit, seen: int) -> None:
        self.num_tokens = request.num_tokens
        self.num_hashes = len(request.block_hashes)
        self.hit = hit
        self.seen = seen
        self.hashes: frozenset[BlockHash] | None = None
        """Made when first needed: most requests are admitted at once."""


class LookupMemory:
    """The last answers. `active` tells whether changes need to be reported at all."""

    def __init__(self) -> None:
        self.active = False
        self._lookups: dict[str, _Lookup] = {}
        self._changes: list[BlockHash] = []

    def __len__(self) -> int:
        return len(self._lookups)

    def changed(self, block_hashes: Iterable[BlockHash]) -> None:
        """These hashes were registered or evicted in some group."""
        self._changes += block_hashes
        if len(self._changes) > MAX_CHANGES:
            self.clear()

    def get(self, request: KVCacheRequest) -> CacheHit | None:
        """The answer for a request, None if it must be looked up."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            return None
        hashes = request.block_hashes
        if lookup.num_tokens != request.num_tokens or lookup.num_hashes != len(hashes):
            return None
        if lookup.seen < len(self._changes):
            if lookup.hashes is None:
                lookup.hashes = frozenset(hashes)
            if not lookup.hashes.isdisjoint(self._changes[lookup.seen :]):
                return None
            lookup.seen = len(self._changes)
        return lookup.hit

    def put(self, request: KVCacheRequest, hit: CacheHit) -> None:
        """Remember an answer; the oldest goes if there are too many."""
        self._lookups.pop(request.request_id, None)
        if len(self._lookups) >= MAX_LOOKUPS:
            del self._lookups[next(iter(self._lookups))]
        self._lookups[request.request_id] = _Lookup(request, hit, len(self._changes))
        self.active = True

    def take(self, request_id: str) -> CacheHit | None:
        """Forget a request; its last answer, right or not."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is None:
            return None
        if not self._lookups:
            self.clear()
        return lookup.hit

    def clear(self) -> None:
        """Forget all."""
        self._lookups.clear()
        self._changes.clear()
        self.active = False
