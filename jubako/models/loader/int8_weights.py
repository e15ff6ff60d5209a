"""How are the int8 weights of compressed-tensors expanded?

(Format "int-quantized".) `weight` [n, m] int8 is stored as it is, with scales beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jubako.models.loader import packed_weights as packed
from jubako.models.loader.compressed_groups import endings, group_sizes, read_groups
from jubako.models.loader.packed_weights import PackedWeight

MAIN = ".weight"


def int8_weights(
    files: Sequence[Path],
    quantisation: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the files, expanded to `dtype` on `device`. See `packed_weights`."""
    expand = partial(_expanded, sizes=group_sizes(quantisation))
    return packed.packed_weights(files, endings(quantisation, MAIN, "I8"), expand, dtype, device)


def _expanded(weight: PackedWeight, dtype: torch.dtype, sizes: set[int]) -> torch.Tensor:
    shape = weight.shape(MAIN)
    if len(shape) != 2:
        raise weight.fault(MAIN, f"shape {list(shape)}; it needs two sizes")
    n, m = shape
    groups = read_groups(weight, n, m, sizes)
    out = torch.empty(n, m, dtype=dtype)
    step = max(1, packed.CHUNK_ELEMENTS // max(1, m))
    for start in range(0, n, step):
        stop = min(start + step, n)
        numbers = weight.rows(MAIN, start, stop).to(torch.float32)
        out[start:stop] = groups.expand(numbers, start)
    return out
