"""How are AWQ weights expanded?

(Lin et al. 2023, arXiv 2306.00978; the GEMM layout of AutoAWQ.) Of a weight [n, m] in 4 bits,
`qweight` [m, n / 8] int32 holds the numbers of eight consecutive rows in each word, `qzeros`
[groups, n / 8] their zero points in the same way, `scales` [groups, n]. Within a word the rows are
interleaved: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits. A value is (number - zero point) · scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jubako.checkpoint.quantisation import group_size
from jubako.models.loader import packed_weights as packed
from jubako.models.loader.packed_weights import Endings, PackedWeight, fields

BITS = 4
PER_WORD = 8
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where rows 0, 1, 2, ... of a word are."""
ENDINGS = Endings(".qweight", "I32", (".qzeros", ".scales"))


def awq_weights(
    files: Sequence[Path],
    quantisation: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the files, expanded to `dtype` on `device`. See `packed_weights`."""
    expand = partial(_expanded, group=group_size(quantisation, "q_group_size"))
    return packed.packed_weights(files, ENDINGS, expand, dtype, device)


def _expanded(weight: PackedWeight, dtype: torch.dtype, group: int | None) -> torch.Tensor:
    if len(weight.shape(".qweight")) != 2:
        raise weight.fault(
            ".qweight", f"shape {list(weight.shape('.qweight'))}; it needs two sizes"
        )
    m, words = weight.shape(".qweight")
    n = words * PER_WORD
    size = group or max(m, 1)
    groups = -(-m // size)
    weight.require(".scales", (groups, n))
    weight.require(".qzeros", (groups, words))
    scales = weight.read(".scales", torch.float32)
    zeros = fields(weight.read(".qzeros"), BITS, SHIFTS).flatten(1)

    out = torch.empty(n, m, dtype=dtype)
    step = max(1, packed.CHUNK_ELEMENTS // max(1, n))
    for start in range(0, m, step):
        stop = min(start + step, m)
        numbers = fields(weight.rows(".qweight", start, stop), BITS, SHIFTS).flatten(1)
        of = torch.arange(start, stop) // size
        out[:, start:stop] = ((numbers - zeros[of]) * scales[of]).T
    return out
