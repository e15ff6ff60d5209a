"""What a cache lookup must find, by definition rather than by search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import lcm

from jubako.kv_cache import (
    BlockPool,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from jubako.kv_cache.specs import cdiv

from .fakes import FakeRequest


def needed_blocks(spec: KVCacheSpec, length: int) -> range:
    """Indices that a request of `length` computed tokens goes on from."""
    size = spec.block_size
    n = length // size
    if isinstance(spec, FullAttentionSpec):
        return range(n)
    if isinstance(spec, SlidingWindowSpec):
        return range(n - min(n, max(1, cdiv(spec.sliding_window - 1, size))), n)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = spec.attention_chunk_size
        return range(length // chunk * chunk // size, n)
    assert isinstance(spec, MambaSpec)
    return range(max(n - 1, 0), n)


def oracle(
    specs: Sequence[KVCacheSpec],
    cached: Sequence[Collection[int]],
    max_length: int,
    eagle_groups: Collection[int] = (),
    alignment: int = 1,
) -> int:
    """The longest hit when group g has the block indices `cached[g]`."""
    step = lcm(alignment, *(spec.block_size for spec in specs))
    for length in range(max_length // step * step, 0, -step):
        if all(
            _servable(spec, cached[g], length, max_length, g in eagle_groups)
            for g, spec in enumerate(specs)
        ):
            return length
    return 0


def _servable(
    spec: KVCacheSpec, cached: Collection[int], length: int, max_length: int, eagle: bool
) -> bool:
    needed = set(needed_blocks(spec, length))
    if eagle and not isinstance(spec, MambaSpec):
        following = length // spec.block_size
        if (following + 1) * spec.block_size > max_length:
            return False
        needed.add(following)
    return needed <= set(cached)


def fill(
    pool: BlockPool, req: FakeRequest, group: int, block_size: int, cached: Collection[int]
) -> None:
    """Make the given blocks of `req` findable, in order: ids are handed out ascending."""
    blocks = dict(zip(sorted(cached), pool.get_new_blocks(len(cached))))
    row = [blocks.get(i, pool.null_block) for i in range(max(cached, default=-1) + 1)]
    pool.cache_full_blocks(req, row, 0, len(row), block_size, group)
