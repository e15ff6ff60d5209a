"""Which KV exists, who owns it, and what of it can be used again?

The logical half of the KV cache: block ids, tables and hashes. No tensor is touched here.

* specs, config, grouping, sizing: from a model's layers to groups, blocks and tensors
* blocks, free_queue, hash_map, block_pool: who owns a block, and how is it found
* hashing, request_hashing: what is it found by
* managers, coordinator, kv_cache_manager: which blocks does a request need
* events, metrics: what is told about it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jubako.utils.lazy import exports_on_use

if TYPE_CHECKING:
    from jubako.kv_cache.block_pool import BlockPool
    from jubako.kv_cache.blocks import BlockHash, BlockHashWithGroupId, KVCacheBlock, KVCacheBlocks
    from jubako.kv_cache.config import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        decode_kv_cache_config,
        encode_kv_cache_config,
    )
    from jubako.kv_cache.coordinator import (
        KVCacheCoordinator,
        KVCacheCoordinatorNoPrefixCache,
        UnitaryKVCacheCoordinator,
    )
    from jubako.kv_cache.coordinator_choice import get_kv_cache_coordinator
    from jubako.kv_cache.events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVCacheEvent,
        KVEventAggregator,
        KVEventBatch,
    )
    from jubako.kv_cache.free_queue import FreeKVCacheBlockQueue
    from jubako.kv_cache.grouping import (
        get_kv_cache_groups,
        unify_hybrid_kv_cache_specs,
        unify_kv_cache_spec_page_size,
    )
    from jubako.kv_cache.hash_map import BlockHashToBlockMap
    from jubako.kv_cache.hashing import (
        BlockHashListWithBlockSize,
        ExternalBlockHash,
        get_block_hash,
        get_group_id,
        get_hash_fn_by_name,
        hash_block_tokens,
        init_none_hash,
        make_block_hash_with_group_id,
    )
    from jubako.kv_cache.hybrid_coordinator import HybridKVCacheCoordinator
    from jubako.kv_cache.kv_cache_manager import KVCacheManager
    from jubako.kv_cache.local_blocks import LocalBlocks
    from jubako.kv_cache.metrics import (
        CachingMetrics,
        KVCacheEvictionEvent,
        KVCacheMetricsCollector,
        PrefixCacheStats,
    )
    from jubako.kv_cache.request import HashedRequest, KVCacheRequest, MediaFeature, MediaPosition
    from jubako.kv_cache.request_hashing import (
        generate_block_hash_extra_keys,
        get_request_block_hasher,
        need_extra_keys,
    )
    from jubako.kv_cache.sizing import (
        estimate_max_model_len,
        fit_max_model_len,
        generate_scheduler_kv_cache_config,
        get_kv_cache_capacity_tokens,
        get_kv_cache_config_from_groups,
        get_kv_cache_configs,
        get_max_concurrency_for_kv_cache_config,
        resolve_kv_cache_block_sizes,
    )
    from jubako.kv_cache.specs import (
        AttentionSpec,
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        FullAttentionSpec,
        KVCacheSpec,
        MambaSpec,
        MLAAttentionSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
        decode_spec,
        encode_spec,
        is_kv_cache_spec_uniform,
    )

__all__ = [
    "AllBlocksCleared",
    "AttentionSpec",
    "BlockHash",
    "BlockHashListWithBlockSize",
    "BlockHashToBlockMap",
    "BlockHashWithGroupId",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CachingMetrics",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "ExternalBlockHash",
    "FreeKVCacheBlockQueue",
    "FullAttentionSpec",
    "HashedRequest",
    "HybridKVCacheCoordinator",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "KVCacheEvent",
    "KVCacheEvictionEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVCacheRequest",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVEventAggregator",
    "KVEventBatch",
    "LocalBlocks",
    "MLAAttentionSpec",
    "MambaSpec",
    "MediaFeature",
    "MediaPosition",
    "PrefixCacheStats",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "UnitaryKVCacheCoordinator",
    "decode_kv_cache_config",
    "decode_spec",
    "encode_kv_cache_config",
    "encode_spec",
    "estimate_max_model_len",
    "fit_max_model_len",
    "generate_block_hash_extra_keys",
    "generate_scheduler_kv_cache_config",
    "get_block_hash",
    "get_group_id",
    "get_hash_fn_by_name",
    "get_kv_cache_capacity_tokens",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_configs",
    "get_kv_cache_coordinator",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
    "is_kv_cache_spec_uniform",
    "make_block_hash_with_group_id",
    "need_extra_keys",
    "resolve_kv_cache_block_sizes",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_spec_page_size",
]

# The records of a package are read where its classes are not wanted: in the front end.
__getattr__ = exports_on_use(
    __name__,
    __all__,
    (
        "block_pool",
        "blocks",
        "config",
        "coordinator",
        "coordinator_choice",
        "events",
        "free_queue",
        "grouping",
        "hash_map",
        "hashing",
        "hybrid_coordinator",
        "kv_cache_manager",
        "local_blocks",
        "metrics",
        "request",
        "request_hashing",
        "sizing",
        "specs",
    ),
)
