"""Which layers can share a block table?

Layers of one group hold the same blocks of a request. Blocks of all groups come from one pool, so
their pages must have equal sizes, and groups should have equally many layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from jubako.errors import ConfigError
from jubako.kv_cache.checks import check_chunk_size, check_spec
from jubako.kv_cache.config import KVCacheGroupSpec
from jubako.kv_cache.errors import UnsupportedCacheError
from jubako.kv_cache.specs import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SizingConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
    is_kv_cache_spec_uniform,
)

logger = logging.getLogger(__name__)

GROUP_SIZE_TOLERANCE = 1.25
"""The largest bucket of layers becomes the group size if it is less than this times the smallest:
padding the smaller ones then costs less than splitting the larger ones."""

MAX_EXTRA_SPLIT = 2
"""A group size that wastes nothing is preferred if it splits the smallest bucket no further than
this: every group costs time in each step."""


def get_kv_cache_groups(
    config: SizingConfig, kv_cache_spec: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Groups of the layers in `kv_cache_spec` (layer name to spec), `[]` for a model without KV.

    With `disable_hybrid_kv_cache_manager` the dict is edited in place: windowed layers become full.
    ConfigError if layers cannot live together; if their pages cannot be made equal it is a
    NotImplementedError as well.
    """
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        unify_hybrid_kv_cache_specs(kv_cache_spec)
    layers = {
        name: spec
        for name, spec in kv_cache_spec.items()
        if not isinstance(spec, EncoderOnlyAttentionSpec)
    }
    for spec in layers.values():
        check_spec(spec)
    if not layers:
        return []
    if is_kv_cache_spec_uniform(layers):
        groups = [_group(list(layers), layers)]
    elif uniform := UniformTypeKVCacheSpecs.from_specs(layers):
        groups = [KVCacheGroupSpec(list(layers), uniform)]
    else:
        groups = _groups_of_equal_size(unify_kv_cache_spec_page_size(layers))
    for group in groups:
        _check_chunks(group)
    return groups


def unify_hybrid_kv_cache_specs(kv_cache_spec: dict[str, KVCacheSpec]) -> None:
    """Turn windowed and chunked layers into full ones, in place, if there is a full layer.

    Memory is then spent on all tokens; kernels still mask. ConfigError if the layers cannot become
    one group even so.
    """
    if _is_one_group(kv_cache_spec):
        return
    if any(isinstance(spec, FullAttentionSpec) for spec in kv_cache_spec.values()):
        for name, spec in kv_cache_spec.items():
            if isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
                kv_cache_spec[name] = FullAttentionSpec(
                    block_size=spec.block_size,
                    num_kv_heads=spec.num_kv_heads,
                    head_size=spec.head_size,
                    dtype=spec.dtype,
                    scale_bytes=spec.scale_bytes,
                    page_size_padded=spec.page_size_padded,
                    sliding_window=getattr(spec, "sliding_window", None),
                    attention_chunk_size=getattr(spec, "attention_chunk_size", None),
                )
    if not _is_one_group(kv_cache_spec):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in kv_cache_spec.values()}))
        raise ConfigError(
            f"disable_hybrid_kv_cache_manager needs layers that fit one group, but this model has "
            f"{kinds}; leave the hybrid manager on.",
            "disable_hybrid_kv_cache_manager",
        )


def unify_kv_cache_spec_page_size(
    kv_cache_spec: Mapping[str, KVCacheSpec],
) -> dict[str, KVCacheSpec]:
    """Enlarge smaller pages to the largest: attention by more tokens a block, states by padding.

    NotImplementedError if the largest page is not a multiple of a smaller one.
    """
    kv_cache_spec = _raise_blocks_to_states(kv_cache_spec)
    largest = max(spec.page_size_bytes for spec in kv_cache_spec.values())
    unified = {}
    for name, spec in kv_cache_spec.items():
        page = spec.page_size_bytes
        if page == largest:
            unified[name] = spec
        elif isinstance(spec, MambaSpec):
            unified[name] = replace(spec, page_size_padded=largest)
        elif largest % page == 0:
            unified[name] = spec.copy_with_new_block_size(spec.block_size * (largest // page))
        else:
            raise UnsupportedCacheError(
                f"Layer {name} has KV pages of {page} bytes, which do not divide the largest page "
                f"of {largest} bytes; these layers cannot share one pool of blocks."
            )
    return unified


def _raise_blocks_to_states(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """More tokens a block, until a page of attention is no smaller than one of a state.

    States that are kept for re-use follow, so that all layers have borders at the same tokens.
    """
    states = [s.page_size_bytes for s in layers.values() if isinstance(s, MambaSpec)]
    others = [s.page_size_bytes for s in layers.values() if not isinstance(s, MambaSpec)]
    if not states or not others or max(states) <= max(others):
        return dict(layers)
    factor = cdiv(max(states), max(others))
    return {
        name: spec
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none"
        else spec.copy_with_new_block_size(spec.block_size * factor)
        for name, spec in layers.items()
    }


def _groups_of_equal_size(layers: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    buckets: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        buckets.setdefault(spec, []).append(name)
    group_size = _group_size([len(names) for names in buckets.values()])
    groups = []
    for names in buckets.values():
        if missing := -len(names) % group_size:
            logger.warning(
                "%d padding layers waste up to %.1f%% of the KV memory of %d %s layers",
                missing,
                100 * missing / len(names),
                len(names),
                type(layers[names[0]]).__name__,
            )
        count = cdiv(len(names), group_size)
        # Every count-th layer, so that each pipeline stage owns a share of every group.
        groups += [_group(names[i::count], layers) for i in range(count)]
    return groups


def _group_size(sizes: list[int]) -> int:
    """How many layers a group has, for buckets of these sizes."""
    smallest, largest = min(sizes), max(sizes)
    size = largest if largest < GROUP_SIZE_TOLERANCE * smallest else smallest
    if any(n % size for n in sizes):
        without_padding = gcd(*sizes)
        if without_padding * MAX_EXTRA_SPLIT >= smallest:
            return without_padding
    return size


def _group(names: list[str], layers: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    specs = [layers[name] for name in names]
    return KVCacheGroupSpec(names, type(specs[0]).merge(specs))


def _is_one_group(layers: Mapping[str, KVCacheSpec]) -> bool:
    return is_kv_cache_spec_uniform(layers) or UniformTypeKVCacheSpecs.is_uniform_type(layers)


def _check_chunks(group: KVCacheGroupSpec) -> None:
    specs = [group.kv_cache_spec]
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        specs = list(group.kv_cache_spec.kv_cache_specs.values())
    for spec in specs:
        if isinstance(spec, ChunkedLocalAttentionSpec):
            check_chunk_size(spec)
