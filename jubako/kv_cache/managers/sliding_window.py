"""Which blocks does sliding-window attention need? Those of the last `sliding_window - 1` tokens.

So a hit is a run of blocks that covers a window before its right end, wherever that is; what lies
left of the run is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.managers.base import SingleTypeKVCacheManager
from jubako.kv_cache.specs import KVCacheSpec, SlidingWindowSpec, cdiv


class SlidingWindowManager(SingleTypeKVCacheManager):
    supports_context_parallelism = False

    def __init__(self, kv_cache_spec: SlidingWindowSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.sliding_window = kv_cache_spec.sliding_window

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        block_size = kv_cache_spec.block_size
        num_blocks = window_blocks(kv_cache_spec)
        # A drafter's hit must be followed by one more cached block.
        extra = 1 if use_eagle else 0
        step = lcm(block_size, alignment_tokens) // block_size
        limit = min(max_length // block_size, len(block_hashes)) - extra
        length = max(limit, 0) // step * step

        # A window is tried from its left end, so that a miss moves the next try as far left as
        # possible: O(N / window) if nothing is cached.
        while length > 0:
            left, right = max(length - num_blocks, 0), length + extra
            runs = block_pool.get_cached_run(block_hashes, left, right, kv_cache_group_ids)
            missing = left + len(runs[0])
            if missing == right:
                nulls = [block_pool.null_block] * left
                return tuple(nulls + run[: length - left] for run in runs)
            length = max(missing - extra, 0) // step * step
        return tuple([] for _ in kv_cache_group_ids)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        skipped = num_computed_tokens - self.sliding_window + 1
        return skipped if skipped > 0 else 0

    def next_skip_tokens(self, num_computed_tokens: int) -> int:
        skipped_blocks = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        return (skipped_blocks + 1) * self.block_size + self.sliding_window - 1


def window_blocks(spec: SlidingWindowSpec) -> int:
    """The most blocks that a hit needs before its end."""
    # A window of one token reads no cached block; one is asked for all the same, as evidence.
    return max(cdiv(spec.sliding_window - 1, spec.block_size), 1)
