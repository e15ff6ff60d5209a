"""What does the KV cache hold, and what is done to it as a whole?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from jubako.kv_cache.blocks import KVCacheBlock, KVCacheBlocks
from jubako.kv_cache.checks import check_multiple, check_share
from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.coordinator import CoordinatorOptions
from jubako.kv_cache.coordinator_choice import get_kv_cache_coordinator
from jubako.kv_cache.events import BlockStored, Event, spec_kind
from jubako.kv_cache.growth import Edges, TableGrowth
from jubako.kv_cache.managers import CrossAttentionManager
from jubako.kv_cache.metrics import KVCacheMetricsCollector, PrefixCacheStats
from jubako.kv_cache.specs import cdiv


class KVCacheState:
    """The parts of a KV cache, and all that concerns no single request; see `KVCacheManager`."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        *,
        scheduler_block_size: int | None = None,
        max_num_batched_tokens: int | None = None,
        watermark: float = 0.0,
        interleaved_free: bool = True,
        free_unhashed_first: bool = False,
        use_int_block_hashes: bool = False,
    ) -> None:
        check_share("watermark", watermark, "watermark")
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max_model_len
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            CoordinatorOptions(
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                hash_block_size=hash_block_size,
                enable_caching=enable_caching and bool(kv_cache_config.kv_cache_groups),
                use_eagle=use_eagle,
                enable_kv_cache_events=enable_kv_cache_events,
                dcp_world_size=dcp_world_size,
                pcp_world_size=pcp_world_size,
                metrics_collector=metrics_collector,
                interleaved_free=interleaved_free,
                free_unhashed_first=free_unhashed_first,
                use_int_block_hashes=use_int_block_hashes,
            ),
        )
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.enable_caching = self.coordinator.enable_caching
        self.num_kv_cache_groups = self.coordinator.num_groups
        self.block_pool = self.coordinator.block_pool
        self._growth = TableGrowth(
            self.coordinator.single_type_managers, self.block_pool, self.enable_caching
        )
        sizes = [manager.block_size for manager in self.coordinator.single_type_managers]
        if scheduler_block_size is not None:
            # Without a prefix cache no group goes on from a border of its own.
            of = lcm(*sizes) if self.enable_caching else 1
            check_multiple("scheduler_block_size", scheduler_block_size, of)
        self.scheduler_block_size = scheduler_block_size or lcm(*sizes)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        # One for all results without blocks: decode steps make no garbage.
        self.empty_kv_cache_blocks = KVCacheBlocks(((),) * self.num_kv_cache_groups)
        self._edges: dict[str, Edges] = {}
        self._lookups = self.block_pool.lookup_memory

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The statistics since the last call; None if they are off."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    # The cache as a whole

    def new_step_starts(self) -> None:
        """To be called before each step is planned: states of the last one can now be shared."""
        self.block_pool.forget_new_block_ids()
        self.coordinator.new_step_starts()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and no change, while blocks are in use."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, for instance because what they hold is wrong.

        Running requests that hold them register them again with their next call: by then they must
        have been computed anew.
        """
        in_use = self.block_pool.evict_blocks(set(block_ids))
        if not in_use:
            return
        for request_id in self.coordinator.forget_registered(in_use):
            edges = self._edges.get(request_id)
            if edges is not None:
                edges.move(0, 0)
                edges.uniform = False

    def evict_uncomputed_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Make a request's blocks beyond its computed tokens unfindable.

        For a request whose planned step will not run: its blocks are findable since it was planned.
        """
        for manager, table in zip(
            self.coordinator.single_type_managers, self.coordinator.get_blocks(request_id)
        ):
            first = num_computed_tokens // manager.block_size
            self.evict_blocks(b.block_id for b in table[first:] if not b.is_null)

    def take_registered_block_ids(self) -> list[int]:
        """Ids that became findable since the last call.

        If the step fails they must be evicted, and its requests freed: recurrent groups have
        already moved their states to where the step would have ended.
        """
        return self.block_pool.take_registered_block_ids()

    def take_new_block_ids(self) -> list[int]:
        """Ids handed out in this step since the last call, for whoever must clear their memory."""
        return self.block_pool.take_new_block_ids()

    def settle_registered_blocks(self) -> None:
        """The steps that fill the registered blocks run for certain: forget their ids."""
        self.block_pool.settle_registered_blocks()

    def take_events(self) -> list[Event]:
        """The events since the last call, stores with their group's attention type."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = self.coordinator.specs[event.group_idx]
                event.kv_cache_spec_kind = spec_kind(spec)
                event.kv_cache_spec_sliding_window = getattr(spec, "sliding_window", None)
        return events

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """For each group, how many leading blocks all its requests share."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    # Tables

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The tables of a request."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The tables of a request as ids; null entries are 0."""
        tables = self.coordinator.get_blocks(request_id)
        return tuple([[block.block_id for block in table] for table in tables])

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """The tables, without the blocks that lie wholly beyond the computed tokens."""
        return tuple(
            ids
            if isinstance(manager, CrossAttentionManager)
            else ids[: cdiv(num_computed_tokens, manager.block_size)]
            for manager, ids in zip(
                self.coordinator.single_type_managers, self.get_block_ids(request_id)
            )
        )

    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> KVCacheBlocks:
        """Wrap blocks for each group; without any, the shared empty result."""
        return KVCacheBlocks(tuple(blocks)) if any(blocks) else self.empty_kv_cache_blocks
