"""Which coordinator fits a model, and which options does it rule out?"""

from __future__ import annotations

from jubako.errors import ConfigError
from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.coordinator import (
    CoordinatorOptions,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    eagle_groups,
)
from jubako.kv_cache.hybrid_coordinator import HybridKVCacheCoordinator
from jubako.kv_cache.specs import ChunkedLocalAttentionSpec, CrossAttentionSpec


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig, options: CoordinatorOptions
) -> KVCacheCoordinator:
    """The kind that fits the number of groups. ConfigError if a group rules out an option."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs or not options.enable_caching:
        return KVCacheCoordinatorNoPrefixCache(kv_cache_config, options)
    eagle = eagle_groups(kv_cache_config, options.use_eagle)
    for group_id, spec in enumerate(specs):
        if isinstance(spec, CrossAttentionSpec):
            raise ConfigError(
                "enable_prefix_caching is on, but this model has cross attention, whose KV is not "
                "a function of the prompt's prefix; turn it off.",
                "enable_prefix_caching",
            )
        if isinstance(spec, ChunkedLocalAttentionSpec) and group_id in eagle:
            raise ConfigError(
                "EAGLE drafting with prefix caching does not support chunked local attention; "
                "turn enable_prefix_caching off.",
                "enable_prefix_caching",
            )
    if len(specs) == 1:
        return UnitaryKVCacheCoordinator(kv_cache_config, options)
    return HybridKVCacheCoordinator(kv_cache_config, options)
