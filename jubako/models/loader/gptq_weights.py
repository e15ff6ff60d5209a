"""How are GPTQ weights expanded?

(Frantar et al. 2022, arXiv 2210.17323; the layout of AutoGPTQ and GPTQModel.) Of a weight [n, m] in
`bits` bits, `qweight` [m · bits / 32, n] int32 holds the numbers of consecutive columns in each
word, lowest bits first; `scales` [groups, n]; `qzeros` [groups, n · bits / 32] the zero points of
consecutive rows in each word; `g_idx` [m] the group of each column, which is not its place divided
by the group size where columns were quantised in the order of their activations (`desc_act`).
A value is (number - zero point) · scale.
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

WORD_BITS = 32


def gptq_weights(
    files: Sequence[Path],
    quantisation: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the files, expanded to `dtype` on `device`. See `packed_weights`."""
    required, index = (".qzeros", ".scales"), (".g_idx",)
    in_order = not quantisation.get("desc_act")
    expand = partial(
        _expanded,
        bits=quantisation["bits"],
        group=group_size(quantisation),
        zeros_less_one=quantisation.get("checkpoint_format") != "gptq_v2",
    )
    endings = Endings(
        ".qweight", "I32", required if in_order else required + index, index if in_order else ()
    )
    return packed.packed_weights(files, endings, expand, dtype, device)


def _expanded(
    weight: PackedWeight, dtype: torch.dtype, bits: int, group: int | None, zeros_less_one: bool
) -> torch.Tensor:
    if len(weight.shape(".qweight")) != 2:
        raise weight.fault(
            ".qweight", f"shape {list(weight.shape('.qweight'))}; it needs two sizes"
        )
    word_rows, n = weight.shape(".qweight")
    per_word = WORD_BITS // bits
    m = word_rows * per_word
    size = group or max(m, 1)
    groups = -(-m // size)
    weight.require(".scales", (groups, n))
    weight.require(".qzeros", (groups, -(-n // per_word)))
    scales = weight.read(".scales", torch.float32)
    words = weight.read(".qzeros")
    if zeros_less_one:
        # Added to the word as a whole, as it was subtracted: a zero point 0 borrows from the next.
        words = words + sum(1 << shift for shift in range(0, WORD_BITS, bits))
    zeros = fields(words, bits).flatten(1)[:, :n]
    group_of = _group_of_columns(weight, m, size, groups)

    out = torch.empty(n, m, dtype=dtype)
    step = max(1, packed.CHUNK_ELEMENTS // max(1, n * per_word))
    for start in range(0, word_rows, step):
        stop = min(start + step, word_rows)
        numbers = fields(weight.rows(".qweight", start, stop), bits).mT.reshape(-1, n)
        columns = slice(start * per_word, stop * per_word)
        of = group_of[columns]
        out[:, columns] = ((numbers - zeros[of]) * scales[of]).T
    return out


def _group_of_columns(weight: PackedWeight, m: int, size: int, groups: int) -> torch.Tensor:
    if ".g_idx" not in weight:
        return torch.arange(m) // size
    weight.require(".g_idx", (m,))
    group_of = weight.read(".g_idx").long()
    if m and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        raise weight.fault(
            ".g_idx",
            f"groups {int(group_of.min())} to {int(group_of.max())}, but there are {groups}",
        )
    return group_of
