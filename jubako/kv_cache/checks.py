"""Can a cache of these groups and options work at all?"""

from __future__ import annotations

from typing import TypeGuard, cast

from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

MAMBA_CACHE_MODES = ("none", "all", "align")


def check_spec(spec: KVCacheSpec) -> None:
    """ImpossibleCacheError for sizes that no layer can have."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        for layer in spec.kv_cache_specs.values():
            check_spec(layer)
    check_positive("block_size", spec.block_size, "block_size")
    if isinstance(spec, AttentionSpec):
        check_positive("num_kv_heads", spec.num_kv_heads)
        check_positive("head_size", spec.head_size)
        if isinstance(spec, FullAttentionSpec):
            check_positive("head_size_v", spec.head_size_v)
        # Raises for a dtype that nobody knows, and for padding below the real size.
        check_positive("page_size_bytes", spec.page_size_bytes)
    if isinstance(spec, SlidingWindowSpec):
        check_positive("sliding_window", spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        check_positive("attention_chunk_size", spec.attention_chunk_size)
    if isinstance(spec, SinkFullAttentionSpec):
        _check_sinks(spec)
    if isinstance(spec, MambaSpec):
        _check_states(spec)


def check_chunk_size(spec: ChunkedLocalAttentionSpec) -> None:
    """ImpossibleCacheError unless chunks begin at block borders.

    A block that two chunks share would be dropped, or not looked up, while half of it is needed.
    """
    if spec.attention_chunk_size % spec.block_size:
        raise ImpossibleCacheError(
            f"attention_chunk_size {spec.attention_chunk_size} is not a multiple of the KV block "
            f"size {spec.block_size}; choose a block_size that divides it.",
            "block_size",
        )


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """ImpossibleCacheError for a group that no manager can serve."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        check_spec(spec)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            check_chunk_size(spec)


def check_positive(what: str, value: object, parameter: str | None = None) -> None:
    """ImpossibleCacheError unless `value` is an integer above 0."""
    if not _is_integer(value) or value < 1:
        raise ImpossibleCacheError(f"{what} is {value!r}; it must be an integer above 0", parameter)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_share(what: str, value: object, parameter: str) -> None:
    """ImpossibleCacheError unless `value` is a number from 0, but below 1."""
    is_number = _is_integer(value) or isinstance(value, float)
    if not is_number or not 0 <= cast("float", value) < 1:
        raise ImpossibleCacheError(
            f"{what} is {value!r}; it must be at least 0 and below 1", parameter
        )


def check_multiple(what: str, value: object, of: int, parameter: str | None = None) -> None:
    """ImpossibleCacheError unless `value` is a multiple of `of`, and above 0."""
    if not _is_integer(value) or value < 1 or value % of:
        raise ImpossibleCacheError(
            f"{what} is {value!r}; it must be a multiple of {of}, and above 0", parameter
        )


def _check_sinks(spec: SinkFullAttentionSpec) -> None:
    sink_len = spec.sink_len
    if not _is_integer(sink_len) or sink_len <= 0 or sink_len % spec.block_size:
        raise ImpossibleCacheError(
            f"sink_len is {sink_len!r}; it must be a multiple of the block size {spec.block_size}, "
            f"and above 0",
            "block_size",
        )


def _check_states(spec: MambaSpec) -> None:
    if spec.mamba_cache_mode not in MAMBA_CACHE_MODES:
        raise ImpossibleCacheError(
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}; it must be one of "
            f"{', '.join(MAMBA_CACHE_MODES)}",
            "mamba_cache_mode",
        )
    if not _is_integer(spec.num_speculative_blocks) or spec.num_speculative_blocks < 0:
        raise ImpossibleCacheError(
            f"num_speculative_blocks is {spec.num_speculative_blocks!r}; it must be an integer, "
            "at least 0"
        )
    if spec.page_size_bytes < 1:
        raise ImpossibleCacheError(f"a state of shapes {spec.shapes} takes no memory")
