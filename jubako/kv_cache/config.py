"""Which groups of layers share a block table, and which tensors hold their blocks?

The worker allocates from a `KVCacheConfig`; the scheduler needs only its groups and `num_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jubako.kv_cache.specs import KVCacheSpec, decode_spec, encode_spec


@dataclass
class KVCacheTensor:
    """`size` bytes, used by one layer of each of several groups."""

    size: int
    shared_by: list[str]


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    """The drafter's layers are in this group: prefix hits must leave it one block short."""


@dataclass
class KVCacheConfig:
    """`num_blocks` counts the null block. A real block has a page in every tensor."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor] = field(default_factory=list)
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)


def encode_kv_cache_config(config: KVCacheConfig) -> dict[str, Any]:
    """`config` as builtins that msgpack and JSON carry."""
    return {
        "num_blocks": config.num_blocks,
        "kv_cache_tensors": [
            {"size": tensor.size, "shared_by": list(tensor.shared_by)}
            for tensor in config.kv_cache_tensors
        ],
        "kv_cache_groups": [
            {
                "layer_names": list(group.layer_names),
                "kv_cache_spec": encode_spec(group.kv_cache_spec),
                "is_eagle_group": group.is_eagle_group,
            }
            for group in config.kv_cache_groups
        ],
    }


def decode_kv_cache_config(encoded: Mapping[str, Any]) -> KVCacheConfig:
    """The inverse of `encode_kv_cache_config`."""
    return KVCacheConfig(
        num_blocks=encoded["num_blocks"],
        kv_cache_tensors=[KVCacheTensor(**tensor) for tensor in encoded["kv_cache_tensors"]],
        kv_cache_groups=[
            KVCacheGroupSpec(
                layer_names=group["layer_names"],
                kv_cache_spec=decode_spec(group["kv_cache_spec"]),
                is_eagle_group=group["is_eagle_group"],
            )
            for group in encoded["kv_cache_groups"]
        ],
    )
