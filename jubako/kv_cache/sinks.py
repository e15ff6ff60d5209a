"""Which blocks are set aside for sink tokens?

The managers take them first, in order of the groups, from a pool that hands out ascending ids after
the null block. So their ids follow from the groups, and a worker knows them without being told.
"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.kv_cache.config import KVCacheGroupSpec
from jubako.kv_cache.specs import (
    KVCacheSpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
)


def sink_block_ids(groups: Sequence[KVCacheGroupSpec]) -> list[range]:
    """The blocks of each group's sinks, in order of their positions; empty where it has none."""
    ids = []
    next_id = 1
    for group in groups:
        count = _num_sink_blocks(group.kv_cache_spec)
        ids.append(range(next_id, next_id + count))
        next_id += count
    return ids


def _num_sink_blocks(spec: KVCacheSpec) -> int:
    if isinstance(spec, UniformTypeKVCacheSpecs) and spec.kv_cache_specs:
        spec = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(spec, SinkFullAttentionSpec):
        return 0
    return cdiv(spec.sink_len or 0, spec.block_size)
