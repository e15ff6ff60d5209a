"""How many blocks fit into the memory, is that enough, and how long may a request be?

All answers count whole blocks and set aside those that no request can use: the null block and the
blocks of attention sinks. A start that passes the check can therefore run one request of
`max_model_len` tokens to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from math import gcd, lcm
from types import SimpleNamespace
from typing import Any

from jubako.errors import ConfigError
from jubako.kv_cache.checks import check_positive
from jubako.kv_cache.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.grouping import get_kv_cache_groups
from jubako.kv_cache.sinks import sink_block_ids
from jubako.kv_cache.specs import (
    KVCacheSpec,
    MambaSpec,
    SizingConfig,
    UniformTypeKVCacheSpecs,
    cdiv,
)

GIB = 1 << 30


@dataclass(frozen=True)
class _AtLength:
    """A configuration seen with another `max_model_len`."""

    model_config: Any
    scheduler_config: Any
    parallel_config: Any
    cache_config: Any

    @classmethod
    def of(cls, config: SizingConfig, max_model_len: int) -> _AtLength:
        return cls(
            SimpleNamespace(max_model_len=max_model_len),
            config.scheduler_config,
            config.parallel_config,
            config.cache_config,
        )


def get_kv_cache_config_from_groups(
    config: SizingConfig, groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> KVCacheConfig:
    """Blocks and tensors that fill `available_memory` bytes (or `num_gpu_blocks_override`)."""
    if not any(group.layer_names for group in groups):
        return KVCacheConfig(1, [], list(groups))
    num_blocks = max(available_memory // _bytes_per_block(groups), 0)
    override = config.cache_config.num_gpu_blocks_override
    if override is not None:
        num_blocks = override
    return KVCacheConfig(num_blocks, _tensors(groups, num_blocks), list(groups))


def get_kv_cache_configs(
    config: SizingConfig,
    kv_cache_specs: Sequence[dict[str, KVCacheSpec]],
    available_memory: Sequence[int],
) -> list[KVCacheConfig]:
    """A config for each worker, all with the same groups and the same number of blocks.

    `kv_cache_specs[i]` and `available_memory[i]` (bytes) are worker i's layers and memory. With
    `original_max_model_len == -1` the memory is checked for the longest length that fits;
    `fit_max_model_len` tells which one that is. ConfigError if one request of the longest length
    would not fit.
    """
    groups, by_worker = _group_workers(config, kv_cache_specs)
    _check_memory(config, by_worker, available_memory)
    configs = [
        get_kv_cache_config_from_groups(config, own, memory)
        for own, memory in zip(by_worker, available_memory, strict=True)
    ]
    # A worker without layers has room for any number of blocks.
    counts = [c.num_blocks for c in configs if c.kv_cache_tensors or not groups]
    num_blocks = min(counts, default=1)
    for worker_config in configs:
        for tensor in worker_config.kv_cache_tensors:
            tensor.size = tensor.size // worker_config.num_blocks * num_blocks
        worker_config.num_blocks = num_blocks
    return configs


def fit_max_model_len(
    config: SizingConfig,
    kv_cache_specs: Sequence[dict[str, KVCacheSpec]],
    available_memory: Sequence[int],
) -> int:
    """The largest `max_model_len`, in tokens, up to the configured one, that every worker can hold.

    ConfigError if not even one token fits.
    """
    _, by_worker = _group_workers(config, kv_cache_specs)
    length = _longest(config, by_worker, available_memory)
    if length == 0:
        raise ConfigError(
            f"No request fits into the {min(available_memory)} bytes of memory that are left for "
            f"the KV cache; lower block_size, max_num_seqs or max_num_batched_tokens, set "
            f"kv_cache_memory_bytes, or take a smaller model.",
            "max_model_len",
        )
    return length


def estimate_max_model_len(
    config: SizingConfig, kv_cache_spec: dict[str, KVCacheSpec], available_memory: int
) -> int:
    """The largest `max_model_len` that fits into `available_memory` bytes, 0 if none does."""
    _, by_worker = _group_workers(config, [kv_cache_spec])
    return _longest(config, by_worker, [available_memory])


def generate_scheduler_kv_cache_config(configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    """What the scheduler needs: the groups, each with a spec of one layer, and `num_blocks`."""
    result = deepcopy(configs[0])
    for index, group in enumerate(result.kv_cache_groups):
        # The first pipeline stage may own no layer of this group.
        specs = [c.kv_cache_groups[index].kv_cache_spec for c in configs]
        for spec in specs:
            if isinstance(spec, UniformTypeKVCacheSpecs) and spec.kv_cache_specs:
                group.kv_cache_spec = next(iter(spec.kv_cache_specs.values()))
                break
    return result


def get_max_concurrency_for_kv_cache_config(
    config: SizingConfig, kv_cache_config: KVCacheConfig
) -> float:
    """How many requests of `max_model_len` tokens the cache holds at once."""
    blocks = _blocks_of_one_request(config, kv_cache_config.kv_cache_groups)
    return kv_cache_config.num_blocks / blocks if blocks else 0.0


def get_kv_cache_capacity_tokens(config: SizingConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens in the cache when it is full of requests of `max_model_len` tokens."""
    concurrency = get_max_concurrency_for_kv_cache_config(config, kv_cache_config)
    return int(concurrency * config.model_config.max_model_len)


def resolve_kv_cache_block_sizes(
    kv_cache_config: KVCacheConfig, config: SizingConfig
) -> tuple[int, int]:
    """`(scheduler_block_size, hash_block_size)` in tokens.

    All groups have a block border at every multiple of the first; a request's block hashes cover
    the second. `cache_config.hash_block_size`, where it exists and is set, replaces the second.
    ConfigError if it does not divide every block size, or for context parallelism with more than
    one group.
    """
    cache, parallel = config.cache_config, config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) <= 1:
        block_size = (specs[0].block_size if specs else cache.block_size) * ranks
        return block_size, block_size
    if ranks != 1:
        raise ConfigError(
            f"Context parallelism of {ranks} ranks needs one KV cache group; "
            f"this model has {len(specs)}.",
            "decode_context_parallel_size",
        )
    sizes = [spec.block_size for spec in specs]
    common = reduce(lcm, sizes)
    override: int | None = getattr(cache, "hash_block_size", None)
    if override is not None:
        if any(size % override for size in sizes):
            raise ConfigError(
                f"hash_block_size {override} does not divide the KV block sizes {sizes}.",
                "hash_block_size",
            )
        return common, override
    if not cache.enable_prefix_caching:
        transfer = getattr(config, "kv_transfer_config", None)
        connector = getattr(transfer, "kv_connector", transfer) is not None
        # A state without prefix caching has a block as long as the context; dividing by it would
        # leave blocks of a few tokens to hash.
        odd_state = any(
            isinstance(spec, MambaSpec) and spec.block_size != cache.block_size for spec in specs
        )
        if not connector or odd_state:
            return common, common
    return common, reduce(gcd, sizes)


def _group_workers(
    config: SizingConfig, kv_cache_specs: Sequence[dict[str, KVCacheSpec]]
) -> tuple[list[KVCacheGroupSpec], list[list[KVCacheGroupSpec]]]:
    """The model's groups, and the same groups with only each worker's layers."""
    merged: dict[str, KVCacheSpec] = {}
    for layers in kv_cache_specs:
        for name, spec in layers.items():
            if merged.setdefault(name, spec) != spec:
                raise ImpossibleCacheError(
                    f"layer {name} has two KV cache specs: {merged[name]} and {spec}"
                )
    groups = get_kv_cache_groups(config, merged)
    return groups, [[_project(group, layers) for group in groups] for layers in kv_cache_specs]


def _project(group: KVCacheGroupSpec, layers: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    names = [name for name in group.layer_names if name in layers]
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        own = {name: spec.kv_cache_specs[name] for name in names}
        spec = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=own)
    return KVCacheGroupSpec(names, spec, group.is_eagle_group)


def _bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of one block over all layers of the largest group; 0 if there is no layer."""
    owned = [group for group in groups if group.layer_names]
    if not owned:
        return 0
    if isinstance(owned[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        return owned[0].kv_cache_spec.page_size_bytes
    pages = {group.kv_cache_spec.page_size_bytes for group in owned}
    if len(pages) != 1:
        raise ImpossibleCacheError(f"groups have different page sizes: {sorted(pages)}")
    return pages.pop() * max(len(group.layer_names) for group in owned)


def _tensors(groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> list[KVCacheTensor]:
    owned = [group for group in groups if group.layer_names]
    spec = owned[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [
            KVCacheTensor(layer.page_size_bytes * num_blocks, [name])
            for name, layer in spec.kv_cache_specs.items()
        ]
    # Layer i of every group shares tensor i: the groups use disjoint block ids.
    return [
        KVCacheTensor(
            spec.page_size_bytes * num_blocks,
            [group.layer_names[i] for group in owned if i < len(group.layer_names)],
        )
        for i in range(max(len(group.layer_names) for group in owned))
    ]


def _blocks_of_one_request(config: SizingConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Most blocks that one request of `max_model_len` tokens holds, over all groups."""
    return sum(
        cdiv(
            group.kv_cache_spec.max_memory_usage_bytes(config), group.kv_cache_spec.page_size_bytes
        )
        for group in groups
        if not _is_empty(group.kv_cache_spec)
    )


def _is_empty(spec: KVCacheSpec) -> bool:
    return isinstance(spec, UniformTypeKVCacheSpecs) and not spec.kv_cache_specs


def _reserved_blocks(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Blocks that no request can use: the null block and the sinks."""
    return 1 + sum(len(ids) for ids in sink_block_ids(groups))


def _memory_needed(config: SizingConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    blocks = _blocks_of_one_request(config, groups) + _reserved_blocks(groups)
    return blocks * _bytes_per_block(groups)


def _memory_of(
    config: SizingConfig, groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> int:
    """What the check may count on: a fixed number of blocks is taken at its word."""
    override: int | None = config.cache_config.num_gpu_blocks_override
    return available_memory if override is None else override * _bytes_per_block(groups)


def _fits(
    config: SizingConfig,
    by_worker: Sequence[Sequence[KVCacheGroupSpec]],
    available_memory: Sequence[int],
) -> bool:
    return all(
        _memory_needed(config, groups) <= _memory_of(config, groups, memory)
        for groups, memory in zip(by_worker, available_memory, strict=True)
        if _bytes_per_block(groups)
    )


def _longest(
    config: SizingConfig,
    by_worker: Sequence[Sequence[KVCacheGroupSpec]],
    available_memory: Sequence[int],
) -> int:
    low, high = 0, config.model_config.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(_AtLength.of(config, middle), by_worker, available_memory):
            low = middle
        else:
            high = middle - 1
    return low


def _check_memory(
    config: SizingConfig,
    by_worker: Sequence[Sequence[KVCacheGroupSpec]],
    available_memory: Sequence[int],
) -> None:
    """ConfigError that names need, memory and the longest length, if one request would not fit."""
    override = config.cache_config.num_gpu_blocks_override
    if override is not None:
        check_positive("num_gpu_blocks_override", override, "num_gpu_blocks_override")
    for groups, available in zip(by_worker, available_memory, strict=True):
        if not _bytes_per_block(groups):
            continue
        memory = _memory_of(config, groups, available)
        if memory <= 0:
            raise ConfigError(
                f"No memory is left for the KV cache ({memory} bytes); raise "
                f"kv_cache_memory_bytes or gpu_memory_utilization.",
                "kv_cache_memory_bytes",
            )
    max_model_len = config.model_config.max_model_len
    longest = _longest(config, by_worker, available_memory)
    automatic = getattr(config.model_config, "original_max_model_len", None) == -1
    if longest == max_model_len or (automatic and longest > 0):
        return
    for groups, available in zip(by_worker, available_memory, strict=True):
        needed, memory = _memory_needed(config, groups), _memory_of(config, groups, available)
        if needed > memory:
            blocks = config.cache_config.num_gpu_blocks_override
            raised = "kv_cache_memory_bytes or gpu_memory_utilization"
            if blocks is not None:
                raised = f"num_gpu_blocks_override={blocks}"
            # Only then is there a length to lower it to.
            lower = f"At most {longest} tokens fit: lower max_model_len to that, or raise"
            raise ConfigError(
                f"One request of max_model_len {max_model_len} needs {needed / GIB:.2f} GiB of KV "
                f"cache ({needed} bytes), but {memory / GIB:.2f} GiB ({memory} bytes) are "
                f"available. {lower if longest else 'Raise'} {raised}.",
                "max_model_len",
            )
