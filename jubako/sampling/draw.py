"""Which token does each random row draw?

`argmax_v softmax(logits)_v / e_v` with e i.i.d. Exp(1); taking logarithms, `argmax_v logits_v +
g_v` with Gumbel noise g. The noise is a pure function of (seed, output index, token), so drawing
from the candidates that top-k or top-p left, or from the whole vocabulary, gives the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jubako.sampling.best_tokens import pack_rows
from jubako.sampling.noise import gumbel_noise, noise_bits

_FINALISTS = 16
_MANY = 1 << 14
_CHUNK_ENTRIES = 1 << 22
"""Logits whose mask exists at a time: 4 MiB."""
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
    best = logits.argmax(dim=1, keepdim=True)
    score = logits.gather(1, best).to(torch.float64) + gumbel_noise(keys, best)
    score = score.to(torch.float32)
    step = max(1, _CHUNK_ENTRIES // logits.shape[1])
    drawn = []
    for part, part_keys, part_best, part_score in zip(
        logits.split(step), keys.split(step), best.split(step), score.split(step), strict=True
    ):
        possible = _possible_winners(part, part_keys, part_score)
        # Where a row has no numbers, nothing compares.
        possible.scatter_(1, part_best, True)
        drawn.append(_draw_among(part, part_keys, possible))
    return torch.cat(drawn)


def _possible_winners(logits: Tensor, keys: Tensor, score: Tensor) -> Tensor:
    """Mask [n, V] of the tokens among which the winner of each row is; usually a handful.

    With s the noisy `score` [n, 1] of the best token, token v can win only if `logits_v + g_v >=
    s`, that is if `e_v <= exp(logits_v - s)`. As `e = -log(1 - u) >= u`, it is enough to compare
    its uniform number u with that: one exponential a token, and no logarithm.
    """
    n, size = logits.shape
    possible = torch.empty(n, size, dtype=torch.bool, device=logits.device)
    vocabulary = torch.arange(size, dtype=torch.int32, device=logits.device).unsqueeze(0)
    entries = _CPU_PIECE if logits.device.type == "cpu" else n * size
    height, width = max(1, entries // size), min(entries, size)
    for top in range(0, n, height):
        rows = slice(top, top + height)
        for left in range(0, size, width):
            columns = slice(left, left + width)
            # u in units of 2^-32, less 2^31, as noise_bits has its upper bit flipped. Both sides
            # are rounded to float32: the slack makes up for it.
            limit = logits[rows, columns] - score[rows]
            limit.exp_().mul_(1.001 * 2.0**32).add_(1024 - 2.0**31)
            bits = noise_bits(keys[rows], vocabulary[:, columns]).bitwise_xor_(-(1 << 31))
            torch.le(bits.to(torch.float32), limit, out=possible[rows, columns])
    return possible


def _draw_among(logits: Tensor, keys: Tensor, possible: Tensor) -> Tensor:
    """Token ids [n] drawn from the tokens that `possible` [n, V] marks, at least one a row."""
    rows, ids = possible.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=logits.shape[0])
    crowded = (counts > _MANY).nonzero().squeeze(1).tolist()
    for row in crowded:
        # A flat row rules out few tokens; noise in float32 tells nearly all of them apart.
        crowd = ids[rows == row]
        noise = gumbel_noise(keys[row : row + 1], crowd.unsqueeze(0), torch.float32)[0]
        finalists = (logits[row, crowd] + noise).topk(_FINALISTS).indices
        possible[row] = False
        possible[row, crowd[finalists]] = True
    if crowded:
        rows, ids = possible.nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=logits.shape[0])
    return draw_from_candidates(*pack_rows(logits, rows, ids, counts), keys)
