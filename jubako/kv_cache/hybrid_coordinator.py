"""Which length can groups with different needs all go on from?

Each group is asked for the longest hit up to what the others have, until all agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.coordinator import CoordinatorOptions, KVCacheCoordinator
from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.hashing import hashes_at_block_size
from jubako.kv_cache.managers import SingleTypeKVCacheManager, spec_manager_map
from jubako.kv_cache.managers.base import NEVER
from jubako.kv_cache.managers.sliding_window import window_blocks
from jubako.kv_cache.specs import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True, slots=True)
class _AttentionGroup:
    """Groups with equal needs, which are looked up together."""

    spec: KVCacheSpec
    group_ids: list[int]
    manager_class: type[SingleTypeKVCacheManager]
    use_eagle: bool

    @property
    def is_full(self) -> bool:
        return isinstance(self.spec, FullAttentionSpec)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups with different specs."""

    def __init__(self, kv_cache_config: KVCacheConfig, options: CoordinatorOptions) -> None:
        super().__init__(kv_cache_config, options)
        if options.dcp_world_size * options.pcp_world_size != 1:
            raise ImpossibleCacheError(
                f"a hybrid model does not support context parallelism: "
                f"decode_context_parallel_size {options.dcp_world_size}, "
                f"prefill_context_parallel_size {options.pcp_world_size}; set both to 1",
                "decode_context_parallel_size",
            )
        self.hash_block_size = options.hash_block_size
        for spec in self.specs:
            if spec.block_size % self.hash_block_size:
                raise ImpossibleCacheError(
                    f"KV block size {spec.block_size} is not a multiple of hash_block_size "
                    f"{self.hash_block_size}",
                    "hash_block_size",
                )
        self.attention_groups = self._attention_groups()
        if len(set(self.specs)) == 1:
            raise ImpossibleCacheError(
                f"a hybrid model needs two different KV cache specs, but all {self.num_groups} "
                f"groups have the same; make them one group"
            )
        self.lcm_block_size = lcm(*(spec.block_size for spec in self.specs))
        self._needed_blocks = [
            window_blocks(spec) if isinstance(spec, SlidingWindowSpec) else NEVER
            for spec in self.specs
        ]
        """Most blocks that each group needs before the end of a hit."""
        self._finds_whole = self.attention_groups[0].is_full and all(
            type(spec) in (FullAttentionSpec, SlidingWindowSpec)
            and spec.block_size == self.lcm_block_size
            and not self.eagle_group_ids
            for spec in self.specs
        )

    def _find_whole_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int] | None:
        """The hit if all groups have all that full attention has, as is usual while requests with
        the same prefix come one after the other; else None."""
        size = self.lcm_block_size
        hashes = hashes_at_block_size(block_hashes, self.hash_block_size, size)
        most = max_length // size
        runs = self.block_pool.get_cached_run(hashes, 0, most, range(self.num_groups))
        found = len(runs[0])
        if found < min(most, len(hashes)):
            full_groups = self.attention_groups[0].group_ids
            if self.block_pool.get_cached_block(hashes[found], full_groups) is not None:
                return None
        length = found * size
        for needed, run in zip(self._needed_blocks, runs):
            if needed < found:
                run[: found - needed] = [self.block_pool.null_block] * (found - needed)
        return tuple(runs), length, length

    def _attention_groups(self) -> list[_AttentionGroup]:
        alike: dict[tuple[KVCacheSpec, bool], list[int]] = {}
        for group_id, spec in enumerate(self.specs):
            # A state after a block needs no look-ahead.
            use_eagle = group_id in self.eagle_group_ids and not isinstance(spec, MambaSpec)
            alike.setdefault((spec, use_eagle), []).append(group_id)
        groups = [
            _AttentionGroup(spec, group_ids, spec_manager_map[type(spec)], use_eagle)
            for (spec, use_eagle), group_ids in alike.items()
        ]
        # Full attention first: its hit bounds all others, and any prefix of it is a hit.
        return sorted(groups, key=lambda group: not group.is_full)

    def find_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int]:
        if self._finds_whole:
            whole = self._find_whole_hit(block_hashes, max_cache_hit_length)
            if whole is not None:
                return whole
        hits: dict[int, list[KVCacheBlock]] = {}
        # With one full group before one other, the other's first answer is final.
        one_round = len(self.attention_groups) == 2 and self.attention_groups[0].is_full
        length = max_cache_hit_length
        full_length = 0
        while True:
            shorter = length
            for group in self.attention_groups:
                size = group.spec.block_size
                if group.is_full and group.group_ids[0] in hits:
                    shorter = shorter // size * size
                    continue
                limit = shorter
                if group.use_eagle:
                    # One block more than is wanted, since one is dropped: so a length that was
                    # found before is found again, however often it is looked up.
                    limit = min(shorter + size, max_cache_hit_length)
                found = group.manager_class.find_longest_cache_hit(
                    hashes_at_block_size(block_hashes, self.hash_block_size, size),
                    limit,
                    group.group_ids,
                    self.block_pool,
                    group.spec,
                    group.use_eagle,
                    self.lcm_block_size,
                )
                hits.update(zip(group.group_ids, found))
                shorter = min(shorter, len(found[0]) * size)
                if group.is_full:
                    # Full groups come first and are looked up once.
                    full_length = shorter
            if shorter >= length:
                break
            length = shorter
            if one_round:
                break
        for group in self.attention_groups:
            if group.is_full:
                for group_id in group.group_ids:
                    del hits[group_id][length // group.spec.block_size :]
        found_hits = tuple(hits[group_id] for group_id in range(self.num_groups))
        return found_hits, length, full_length
