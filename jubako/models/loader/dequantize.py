"""What numbers do ggml's quantised blocks stand for?

One function a type, each from blocks `[n, bytes]` uint8 to values `[n, elements]` float32. Layouts
are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h): `d` is a block's scale, `dmin`
its offset, both float16; in the `_K` types 256 elements share them, and sub-blocks of 16 or 32 have
small integer scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from jubako.checkpoint.gguf import TENSOR_TYPES


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 `[n, 1]`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(packed: torch.Tensor, bits: int, shifts: tuple[int, ...]) -> torch.Tensor:
    """Bytes `[..., k]` to `[..., len(shifts), k]`: the field of `bits` bits at each shift.

    `k` is a multiple of 8: eight bytes are worked on at once, as one integer.
    """
    # A single block's slice counts as contiguous wherever it begins: only a copy is aligned.
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64)
    mask = ((1 << bits) - 1) * 0x0101010101010101
    return torch.stack([(words >> shift) & mask for shift in shifts], dim=-2).view(torch.uint8)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes `[..., k]` to `[..., 2, k]`: low halves, then high halves."""
    return _fields(packed, 4, (0, 4))


_PAIRS = (0, 2, 4, 6)
_EIGHTS = tuple(range(8))

_SPREAD = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).to(torch.uint8) << 4
"""Byte → its eight bits, lowest first, as 0 or 16 each."""
_SPREAD_WORDS = _SPREAD.view(torch.int64).view(256)


def _high_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 32 bits of the uint32 at byte `start`, lowest first, as `[n, 32]` of 0 and 16."""
    return _SPREAD_WORDS[blocks[:, start : start + 4].int()].view(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 2:]).view(-1, 32)
    return q.float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 4:]).view(-1, 32)
    return q.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 6:]).view(-1, 32) | _high_bits(blocks, 2)
    return q.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 8:]).view(-1, 32) | _high_bits(blocks, 4)
    return q.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    # scales 16 (scale in the low half, minimum in the high), quants 64, d, dmin
    scales = blocks[:, :16]
    d = (scales & 15).float() * _half(blocks, 80)
    minimum = (scales >> 4).float() * _half(blocks, 82)
    q = _fields(blocks[:, 16:80].view(-1, 2, 32), 2, _PAIRS).view(-1, 16, 16)
    return q.float().mul_(d.unsqueeze(-1)).sub_(minimum.unsqueeze(-1)).view(-1, 256)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    # high bits 32, quants 64, scales 12 (sixteen of six bits), d
    packed = blocks[:, 96:108]
    low4 = _nibbles(packed[:, :8]).view(-1, 16)
    shifts = torch.tensor(_PAIRS, dtype=torch.uint8).view(1, 4, 1)
    high2 = ((packed[:, 8:12].unsqueeze(1) >> shifts) & 3).view(-1, 16)
    scale = (low4 | (high2 << 4)).float() - 32
    q = _fields(blocks[:, 32:96].view(-1, 2, 32), 2, _PAIRS).view(-1, 256)
    # The high bit is stored inverted: unset means four less.
    high = _fields(blocks[:, :32], 1, _EIGHTS).view(-1, 256) << 2
    values = (q | high).float().sub_(4).view(-1, 16, 16)
    return values.mul_((_half(blocks, 108) * scale).unsqueeze(-1)).view(-1, 256)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of six bits from 12 bytes, each `[n, 8]` uint8."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def _scale_and_shift(blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`d * scale * q - dmin * minimum` for the quants `[n, 8, 32]` of Q4_K and Q5_K."""
    scales, minima = _k_scales(blocks[:, 4:16])
    d = scales.float() * _half(blocks, 0)
    minimum = minima.float() * _half(blocks, 2)
    return q.float().mul_(d.unsqueeze(-1)).sub_(minimum.unsqueeze(-1)).view(-1, 256)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    # d, dmin, scales 12, quants 128: each 32 bytes hold two sub-blocks
    return _scale_and_shift(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    # d, dmin, scales 12, high bits 32 (bit i belongs to sub-block i), quants 128
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return _scale_and_shift(blocks, low | (_fields(blocks[:, 16:48], 1, _EIGHTS) << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # low four bits 128, high two bits 64, scales 16 int8, d
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 256)
    high = _fields(blocks[:, 128:192].view(-1, 2, 32), 2, _PAIRS).view(-1, 256) << 4
    scale = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return (low | high).float().sub_(32).view(-1, 16, 16).mul_(scale.unsqueeze(-1)).view(-1, 256)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.view(dtype)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q5_1": _q5_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q4_1": _q4_1,
    "Q4_0": _q4_0,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
}

BLOCKS: dict[str, tuple[int, int]] = {
    name: (elements, nbytes)
    for name, elements, nbytes in TENSOR_TYPES.values()
    if name in _FUNCTIONS
}
"""Name of a type that can be expanded → elements in a block, bytes of a block."""


def dequantize(blocks: torch.Tensor, type: str) -> torch.Tensor:
    """Values `[n, elements]` of blocks `[n, bytes]` (uint8, contiguous, on the CPU).

    float32 for quantised types; float types keep their own dtype. `type` is a key of `BLOCKS`.
    """
    return _FUNCTIONS[type](blocks)
