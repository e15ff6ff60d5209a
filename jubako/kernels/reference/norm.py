"""How does the reference normalise and rotate?

On a CPU long inputs are taken in blocks of tokens whose float32 temporaries stay in the cache and
whose memory is re-used; that is two to three times as fast as whole-tensor operators.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

BLOCK_ELEMENTS = 80_000
"""Elements of a block: 320 KB of float32."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` in float32, rounded to x's dtype at the end."""
    rows = _block_rows(x)
    if x.shape[0] <= rows:
        return _normalised(x, eps).mul_(weight).to(x.dtype)
    out = torch.empty_like(x)
    for part, result in zip(x.split(rows), out.split(rows)):
        torch.mul(_normalised(part, eps), weight, out=result)
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias` in float32, rounded at the end."""
    rows = _block_rows(x)
    if x.shape[0] <= rows:
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for part, result in zip(x.split(rows), out.split(rows)):
        result.copy_(F.layer_norm(part.float(), weight.shape, weight, bias, eps))
    return out


def qk_norm_rope(
    qk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Normalise each head if a weight is given, then rotate it: qk [T, H, D] → [T, H, D]."""
    rows = _block_rows(qk)
    if qk.shape[0] <= rows:
        return _rotated(qk, cos, sin, weight, eps, interleaved).to(qk.dtype)
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    parts = zip(qk.split(rows), cos.split(rows), sin.split(rows), out.split(rows))
    for part, part_cos, part_sin, result in parts:
        result.copy_(_rotated(part, part_cos, part_sin, weight, eps, interleaved))
    return out


def _rotated(
    qk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """The result in float32."""
    x = qk.float() if weight is None else _normalised(qk, eps).mul_(weight)
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return _turned_pairs(x, cos, sin) if interleaved else _turned_halves(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., size:] = x[..., size:]
    turn = _turned_pairs if interleaved else _turned_halves
    out[..., :size] = turn(x[..., :size], cos, sin)
    return out


def _turned_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A new tensor; element 2d turns with element 2d + 1."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., half:]
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(even, cos, out=out[..., 0::2]).addcmul_(odd, sin, value=-1)
    torch.mul(odd, cos, out=out[..., 1::2]).addcmul_(even, sin)
    return out


def _turned_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A new tensor; element d turns with element d + half the size."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps)` over the last dimension, a new float32 tensor."""
    y = x.float()
    inverse_root_size, root_eps = _constants(x.shape[-1], eps, x.device)
    rms = torch.linalg.vector_norm(y, dim=-1, keepdim=True).mul_(inverse_root_size)
    inverse = rms.hypot_(root_eps).reciprocal_()
    return y * inverse if y is x else y.mul_(inverse)


@cache
def _constants(size: int, eps: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """1 / sqrt(size) and sqrt(eps) as tensors: a number costs an operator four times as much."""
    with torch.inference_mode(False):
        numbers = torch.tensor([size**-0.5, eps**0.5], dtype=torch.float32, device=device)
        return numbers[0], numbers[1]


def _block_rows(x: torch.Tensor) -> int:
    """Rows of a block; all of them where blocks bring nothing."""
    rows = x.shape[0]
    if x.numel() <= BLOCK_ELEMENTS or x.device.type != "cpu":
        return rows
    return max(16, BLOCK_ELEMENTS * rows // x.numel())
