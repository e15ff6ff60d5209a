"""How do several groups with different needs act as one?

A hit must be one length that every group can go on from, and a request gets blocks in all groups or
in none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.checks import check_groups, check_positive
from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.hashing import hashes_at_block_size
from jubako.kv_cache.managers import (
    CrossAttentionManager,
    SingleTypeKVCacheManager,
    get_manager_for_kv_cache_spec,
)
from jubako.kv_cache.managers.base import NEVER
from jubako.kv_cache.metrics import KVCacheMetricsCollector
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

GroupBlocks = tuple[Sequence[KVCacheBlock], ...]
"""Blocks for each group, in group order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """What all kinds of coordinators are built from; lengths are in tokens."""

    max_model_len: int
    max_num_batched_tokens: int
    hash_block_size: int
    enable_caching: bool = True
    use_eagle: bool = False
    enable_kv_cache_events: bool = False
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    metrics_collector: KVCacheMetricsCollector | None = None
    interleaved_free: bool = True
    """Free the deepest index of all groups first. Else, group by group: then an eviction may take
    all of one group and leave hits of the others useless."""
    free_unhashed_first: bool = False
    use_int_block_hashes: bool = False


class KVCacheCoordinator(ABC):
    """The pool, and a manager for each group."""

    def __init__(self, kv_cache_config: KVCacheConfig, options: CoordinatorOptions) -> None:
        check_groups(kv_cache_config)
        check_positive("max_model_len", options.max_model_len, "max_model_len")
        check_positive("max_num_batched_tokens", options.max_num_batched_tokens)
        check_positive("hash_block_size", options.hash_block_size, "hash_block_size")
        check_positive("decode_context_parallel_size", options.dcp_world_size)
        check_positive("prefill_context_parallel_size", options.pcp_world_size)
        self.kv_cache_config = kv_cache_config
        self.enable_caching = options.enable_caching
        self.interleaved_free = options.interleaved_free
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks,
            options.enable_caching,
            options.hash_block_size,
            options.enable_kv_cache_events,
            options.metrics_collector,
            free_unhashed_first=options.free_unhashed_first,
            use_int_block_hashes=options.use_int_block_hashes,
        )
        self.specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.num_groups = len(self.specs)
        self.block_pool.declare_groups(self.num_groups)
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            get_manager_for_kv_cache_spec(
                spec,
                self.block_pool,
                options.enable_caching,
                group_id,
                dcp_world_size=options.dcp_world_size,
                pcp_world_size=options.pcp_world_size,
                max_admission_blocks_per_request=_admission_cap(spec, options),
            )
            for group_id, spec in enumerate(self.specs)
        )
        self.eagle_group_ids = eagle_groups(kv_cache_config, options.use_eagle)

    @abstractmethod
    def find_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int]:
        """Hit blocks for each group and the length of the hit in tokens, the same in all groups;
        last the length that the full-attention groups alone would hit, if there are any."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Hit blocks for each group and the length of the hit in tokens, the same in all groups."""
        return self.find_hit(block_hashes, max_cache_hit_length)[:2]

    def get_shared_prefix_length(self, block_hashes: Sequence[BlockHash], max_length: int) -> int:
        """Leading tokens that all full-attention groups have cached, 0 without such a group."""
        found = False
        for spec, manager in zip(self.specs, self.single_type_managers):
            if isinstance(spec, FullAttentionSpec) and max_length:
                group_ids = (manager.kv_cache_group_id,)
                hashes = hashes_at_block_size(
                    block_hashes, self.block_pool.hash_block_size, manager.block_size
                )
                (run,) = self.block_pool.get_cached_run(
                    hashes, 0, max_length // manager.block_size, group_ids
                )
                max_length = len(run) * manager.block_size
                found = True
        return max_length if found else 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: GroupBlocks,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that all groups together will take."""
        needed = 0
        for manager, hits in zip(self.single_type_managers, new_computed_blocks):
            if isinstance(manager, CrossAttentionManager):
                needed += manager.get_num_blocks_to_allocate(
                    request_id, num_encoder_tokens, (), 0, num_encoder_tokens
                )
            else:
                needed += manager.get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    hits,
                    total_computed_tokens,
                    num_tokens_main_model,
                    apply_admission_cap,
                )
        return needed

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: GroupBlocks,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Begin a request's tables with its hits and room for external tokens."""
        counts = num_local_computed_tokens, num_external_computed_tokens
        begun = [
            manager
            for manager, hits in zip(self.single_type_managers, new_computed_blocks)
            if manager.add_local_computed_blocks(request_id, hits, *counts)
        ]
        # Only now that every group owns its hits may any take blocks: they could be those hits.
        for manager in begun:
            manager.allocate_external_computed_blocks(request_id, *counts)

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> GroupBlocks:
        """Lengthen a request's tables and return what was added to each."""
        added = []
        for manager in self.single_type_managers:
            tokens, main = num_tokens, num_tokens_main_model
            if isinstance(manager, CrossAttentionManager):
                tokens = main = num_encoder_tokens
            added.append(manager.allocate_new_blocks(request_id, tokens, main))
        return tuple(added)

    def cache_blocks(self, request: KVCacheRequest, num_computed_tokens: int) -> None:
        """Make the blocks that those tokens fill findable."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_computed_tokens)

    def has_unregistered_gaps(self, request_id: str) -> bool:
        """Whether a table has entries to register in front of others that are registered."""
        return any(m.has_unregistered_gaps(request_id) for m in self.single_type_managers)

    def forget_registered(self, blocks: Iterable[tuple[int, KVCacheBlock]]) -> set[str]:
        """Blocks, each with its group, became unfindable while in use; whose they are."""
        by_group: dict[int, list[KVCacheBlock]] = {}
        for group_id, block in blocks:
            by_group.setdefault(group_id, []).append(block)
        affected: set[str] = set()
        for group_id, own in by_group.items():
            affected |= self.single_type_managers[group_id].forget_registered(own)
        return affected

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, total_computed_tokens)

    def free(self, request_id: str) -> None:
        """Release all blocks of a request; unknown requests are ignored."""
        if not self.interleaved_free or self.num_groups == 1:
            for manager in self.single_type_managers:
                manager.free(request_id)
            return
        tables = [m.pop_blocks_for_free(request_id) for m in self.single_type_managers]
        self.block_pool.free_blocks(reversed(list(self._by_depth(tables))))

    def _by_depth(self, tables: Sequence[list[KVCacheBlock]]) -> Iterable[KVCacheBlock]:
        """The entries of all tables in the order of their first token."""
        sizes = [manager.block_size for manager in self.single_type_managers]
        if len(set(sizes)) == 1:
            by_index = zip_longest(*tables, fillvalue=self.block_pool.null_block)
            return chain.from_iterable(by_index)
        entries = [
            (index * size, group_id, block)
            for group_id, (size, table) in enumerate(zip(sizes, tables))
            for index, block in enumerate(table)
        ]
        entries.sort(key=lambda entry: entry[:2])
        return [block for _, _, block in entries]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request and hand its tables over, one after the other."""
        tables = [m.pop_blocks_for_free(request_id) for m in self.single_type_managers]
        for manager in self.single_type_managers:
            manager.has_detached_tables = True
        return [block for table in tables for block in table]

    def get_blocks(self, request_id: str) -> GroupBlocks:
        """The tables of a request, empty for an unknown one."""
        return tuple([m.req_to_blocks.get(request_id, ()) for m in self.single_type_managers])

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        return [
            manager.get_num_common_prefix_blocks(running_request_id)
            for manager in self.single_type_managers
        ]

    def new_step_starts(self) -> None:
        for manager in self.single_type_managers:
            manager.new_step_starts()

    def next_edges(self, request_id: str, num_computed_tokens: int) -> tuple[int, int]:
        """The smallest number of slots at which any group has something to do, and the smallest
        number of known tokens at which any registers a block."""
        event = hash_ = NEVER
        for manager in self.single_type_managers:
            own_event, own_hash = manager.next_edges(request_id, num_computed_tokens)
            if own_event < event:
                event = own_event
            if own_hash < hash_:
                hash_ = own_hash
        return (event if event < hash_ else hash_), hash_

    def next_hash_tokens(self, request_id: str) -> int:
        """The smallest number of known tokens at which any group registers a block."""
        if not self.enable_caching:
            return NEVER
        return min(
            (manager.next_hash_tokens(request_id) for manager in self.single_type_managers),
            default=NEVER,
        )


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, none included; nothing is ever found."""

    def find_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int]:
        return tuple([] for _ in self.specs), 0, 0

    def cache_blocks(self, request: KVCacheRequest, num_computed_tokens: int) -> None:
        pass

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        return [0] * self.num_groups


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group."""

    def __init__(self, kv_cache_config: KVCacheConfig, options: CoordinatorOptions) -> None:
        super().__init__(kv_cache_config, options)
        self.dcp_world_size = options.dcp_world_size
        self.pcp_world_size = options.pcp_world_size
        (manager,) = self.single_type_managers
        self.block_size = manager.block_size
        if options.hash_block_size != self.block_size:
            raise ImpossibleCacheError(
                f"hash_block_size {options.hash_block_size} must be the block size "
                f"{self.block_size}, for there is one group",
                "hash_block_size",
            )

    def find_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int]:
        hits = type(self.single_type_managers[0]).find_longest_cache_hit(
            block_hashes,
            max_cache_hit_length,
            (0,),
            self.block_pool,
            self.specs[0],
            bool(self.eagle_group_ids),
            self.block_size,
            self.dcp_world_size,
            self.pcp_world_size,
        )
        length = len(hits[0]) * self.block_size
        return hits, length, length


def eagle_groups(kv_cache_config: KVCacheConfig, use_eagle: bool) -> frozenset[int]:
    """Groups whose hits must leave room for the drafter: the marked ones, or all if none is."""
    if not use_eagle:
        return frozenset()
    groups = kv_cache_config.kv_cache_groups
    marked = frozenset(i for i, group in enumerate(groups) if group.is_eagle_group)
    return marked or frozenset(range(len(groups)))


def _admission_cap(spec: KVCacheSpec, options: CoordinatorOptions) -> int | None:
    if isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        return spec.max_admission_blocks_per_request(
            options.max_num_batched_tokens, options.max_model_len
        )
    return None
