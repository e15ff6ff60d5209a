"""How does the reference multiply by a weight matrix?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`: x [T, in], weight [out, in], bias [out] → [T, out]."""
    if x.shape[0] == 1 and x.dtype is torch.bfloat16 and x.device.type == "cpu":
        # PyTorch's matrix-vector product streams bfloat16 weights at about 1.4 times the speed of
        # its matrix product with one row, with the same float32 accumulation.
        out = torch.mv(weight, x[0])
        if bias is not None:
            out += bias
        return out[None]
    return F.linear(x, weight, bias)


def pack(weight: torch.Tensor, interleaved: bool = False, quantization: str = "none") -> Any:
    """Weights stay as they are."""
    del weight, interleaved, quantization
    return None


def pack_blocks(pieces: Sequence[Any], interleaved: bool = False) -> Any:
    """Blocks are expanded."""
    del pieces, interleaved
    return None


def no_packed_matrix(*args: Any) -> torch.Tensor:
    """There are no packed matrices here."""
    raise AssertionError("the reference packs no matrix")
