"""Which token does each random row draw?

`argmax_v softmax(logits)_v / e_v` with e i.i.d. Exp(1); taking logarithms, `argmax_v logits_v +
g_v` with Gumbel noise g. The noise is a pure function of (seed, output index, token), so drawing
from the candidates that top-k or top-p left, or from the whole vocabulary, gives the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jubako.sampling.noise import gumbel_noise, noise_bits

_FINALISTS = 16
_MANY = 1 << 14
_CPU_PIECE = 1 << 15
"""Tokens that are hashed at a time on a CPU: temporaries stay in its cache."""


def draw_from_candidates(values: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """Token ids [n] int64 drawn from candidates.

    `values` [n, k] are float32 logits, -inf where a candidate is excluded; `token_ids` is [n, k]
    int64, `keys` [n, 3] from `noise_keys`. A row whose values are all -inf gives its first.
    """
    scores = values.to(torch.float64) + gumbel_noise(keys, token_ids)
    return token_ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def draw_from_vocabulary(logits: Tensor, keys: Tensor) -> Tensor:
    """Token ids [n] int64 drawn from all of `logits` [n, V] float32."""
    drawn = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    for row in range(logits.shape[0]):
        key = keys[row : row + 1]
        ids = _possible_winners(logits[row], key, vocabulary)
        drawn[row : row + 1] = draw_from_candidates(
            logits[row, ids].unsqueeze(0), ids.unsqueeze(0), key
        )
    return drawn


def _possible_winners(logits: Tensor, key: Tensor, vocabulary: Tensor) -> Tensor:
    """Ids, ascending, among which the winner of `logits` [V] is; usually a handful.

    With s the noisy score of the best token, token v can win only if `logits_v + g_v >= s`, that is
    if `e_v <= exp(logits_v - s)`. As `e = -log(1 - u) >= u`, it is enough to compare its uniform
    number u with that: one exponential a token, and no logarithm.
    """
    best = logits.argmax().reshape(1)
    score = logits[best].to(torch.float64) + gumbel_noise(key, best.unsqueeze(0))[0]
    score = score.to(torch.float32)
    piece = _CPU_PIECE if logits.device.type == "cpu" else logits.shape[0]
    pieces = []
    for part, ids in zip(logits.split(piece), vocabulary.split(piece), strict=True):
        # u in units of 2^-32, less 2^31, as noise_bits has its upper bit flipped. Both sides are
        # rounded to float32: the slack makes up for it.
        limit = (part - score).exp_().mul_(1.001 * 2.0**32).add_(1024 - 2.0**31)
        bits = noise_bits(key, ids.unsqueeze(0))[0].bitwise_xor_(-(1 << 31))
        pieces.append(bits.to(torch.float32) <= limit)
    ids = torch.cat(pieces).nonzero().squeeze(1)
    if ids.numel() > _MANY:
        noisy = logits[ids] + gumbel_noise(key, ids.unsqueeze(0), torch.float32)[0]
        ids = ids[noisy.topk(_FINALISTS).indices.sort().values]
    return ids if ids.numel() else best
