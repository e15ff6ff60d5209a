"""Which random number belongs to a request, an output position and a token?

A pure function of `(seed, output index, token id)`, so the same request draws the same tokens in
any batch, at any row, after preemption, however its prompt was cut, and on every rank. Restricting
a draw to some tokens never changes their noise.

Two stages: Philox-4x32-10 turns (seed, output index, stream) into a 96-bit key (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011), and a keyed 32-bit avalanche hash with two
multiplications turns token ids into bits. The strong generator thus runs once a row, and the cheap
one once a token; both fit in vector registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

TOKEN_STREAM = 0
"""Stream of the noise that draws tokens; other uses of randomness take other numbers."""

_MASK = 0xFFFFFFFF
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85

# Two odd multipliers with low avalanche bias between shifts of 16, 15 and 15 bits.
_MIX_1, _MIX_2 = 0x21F0AAAD, 0xD35A2D97 - (1 << 32)

UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]


def philox_4x32(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array],
    key: tuple[UInt64Array, UInt64Array],
    rounds: int = 10,
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Philox-4x32: four random words for each counter. All words are 32 bits held in uint64."""
    mask, shift = np.uint64(_MASK), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * np.uint64(_PHILOX_M0), c2 * np.uint64(_PHILOX_M1)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & mask, (p0 >> shift) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(_PHILOX_W0)) & mask, (k1 + np.uint64(_PHILOX_W1)) & mask
    return c0, c1, c2, c3


def noise_keys(
    seeds: np.ndarray[Any, Any], output_index: np.ndarray[Any, Any], stream: int = TOKEN_STREAM
) -> Tensor:
    """Keys [n, 3] int32 for requests with `seeds` [n] that draw their `output_index`-th [n] token.

    Seeds are 64 bits, in uint64 or in int64 with the same bits; indices count from 0.
    """
    bits = np.ascontiguousarray(seeds).view(np.uint64)
    index = np.asarray(output_index).astype(np.uint64)
    mask, shift = np.uint64(_MASK), np.uint64(32)
    zeros = np.zeros_like(bits)
    words = philox_4x32(
        (index & mask, index >> shift, zeros + np.uint64(stream), zeros),
        (bits & mask, bits >> shift),
    )
    return torch.from_numpy(np.stack(words[:3], axis=1).astype(np.uint32).view(np.int32))


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits, as int32, for each token.

    `keys` [n, 3] int32 and `token_ids` [n, k] or [1, k] give [n, k].
    """
    # int32 products wrap; arithmetic shifts are made logical by the masks.
    x = token_ids.to(torch.int32) ^ keys[:, 0:1]
    shifted = (x >> 16).bitwise_and_(0xFFFF)
    x.bitwise_xor_(shifted).mul_(_MIX_1).bitwise_xor_(keys[:, 1:2])
    torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    x.bitwise_xor_(shifted).mul_(_MIX_2).bitwise_xor_(keys[:, 2:3])
    torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    return x.bitwise_xor_(shifted)


def gumbel_noise(keys: Tensor, token_ids: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard Gumbel noise [n, k]: `argmax(logits + noise)` draws from `softmax(logits)`.

    It is `-log(e)` with `e` i.i.d. Exp(1), so this equals `argmax(softmax(logits) / e)`.
    """
    bits = noise_bits(keys, token_ids).to(dtype)
    # The unsigned value, formed by addition so that small ones, which make the large noise, stay
    # exact also in float32.
    bits = torch.where(bits < 0, bits + 2.0**32, bits)
    uniform = bits.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
