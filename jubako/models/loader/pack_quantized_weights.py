"""How are the packed integer weights of compressed-tensors expanded?

(Format "pack-quantized".) Of a weight [n, m] of signed numbers in 4 or 8 bits, `weight_packed`
[n, ⌈m · bits / 32⌉] int32 holds those of consecutive columns in each word, lowest bits first, each
with half its range added; `weight_shape` is [n, m].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jubako.checkpoint.quantisation import weight_schemes
from jubako.models.loader import packed_weights as packed
from jubako.models.loader.compressed_groups import WORD_BITS, endings, group_sizes, read_groups
from jubako.models.loader.packed_weights import PackedWeight, fields

MAIN, SHAPE = ".weight_packed", ".weight_shape"


def pack_quantized_weights(
    files: Sequence[Path],
    quantisation: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the files, expanded to `dtype` on `device`. See `packed_weights`."""
    sizes_in_bits = {scheme.get("num_bits", 8) for scheme in weight_schemes(quantisation)}
    expand = partial(_expanded, sizes=group_sizes(quantisation), sizes_in_bits=sizes_in_bits)
    names = endings(quantisation, MAIN, "I32", (SHAPE,))
    return packed.packed_weights(files, names, expand, dtype, device)


def _expanded(
    weight: PackedWeight, dtype: torch.dtype, sizes: set[int], sizes_in_bits: set[int]
) -> torch.Tensor:
    weight.require(SHAPE, (2,))
    n, m = weight.read(SHAPE).long().tolist()
    if min(n, m) < 1:
        raise weight.fault(SHAPE, f"sizes {n} and {m}; both must be above 0")
    # Groups of layers may have different numbers of bits; the width of a row tells which.
    by_width = {(n, -(-m * bits // WORD_BITS)): bits for bits in sorted(sizes_in_bits)}
    weight.require(MAIN, *by_width)
    n, width = weight.shape(MAIN)
    bits = by_width[n, width]
    groups = read_groups(weight, n, m, sizes, bits)
    out = torch.empty(n, m, dtype=dtype)
    step = max(1, packed.CHUNK_ELEMENTS // max(1, m))
    for start in range(0, n, step):
        stop = min(start + step, n)
        numbers = fields(weight.rows(MAIN, start, stop), bits).flatten(1)[:, :m].float()
        out[start:stop] = groups.expand(numbers.sub_(1 << (bits - 1)), start)
    return out
