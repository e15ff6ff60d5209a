"""How much of a prompt must the prefix cache find? The definition, group by group."""

from __future__ import annotations

from collections.abc import Collection
from math import lcm

from jubako.kv_cache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


def unit(groups: Collection[KVCacheSpec]) -> int:
    """Hits are multiples of so many tokens."""
    return lcm(*(spec.block_size for spec in groups))


def expected_hit(
    groups: Collection[KVCacheSpec], known: int, ends: Collection[int], longest: int
) -> int:
    """The longest hit up to `longest` tokens after `known` tokens of the prompt were computed.

    `ends` are the lengths at which chunks of it ended, where recurrent layers that align their
    states have one. A hit is good if every group has all that the next token needs.
    """
    step = unit(groups)
    for length in range(longest // step * step, 0, -step):
        if all(_enough(spec, length, known, ends) for spec in groups):
            return length
    return 0


def _enough(spec: KVCacheSpec, length: int, known: int, ends: Collection[int]) -> bool:
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode == "align":
            return length in ends
        return spec.mamba_cache_mode == "all" and length <= known
    if isinstance(spec, CrossAttentionSpec):
        # It depends on the encoder's input, and is not looked for.
        return False
    if isinstance(spec, ChunkedLocalAttentionSpec):
        # Chunks before the one that the next token is in are never read again.
        return length % spec.attention_chunk_size == 0 or length <= known
    assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec), type(spec)
    return length <= known


def chunk_ends(groups: Collection[KVCacheSpec], tokens: int) -> set[int]:
    """Where the chunks of a new prompt end that one step could compute: at its last border too."""
    aligned = [s for s in groups if isinstance(s, MambaSpec) and s.mamba_cache_mode == "align"]
    border = tokens // unit(aligned) * unit(aligned) if aligned else tokens
    return {border, tokens} - {0}
