"""Which tokens may a row still draw after top-k and top-p?

Most rows keep few tokens; these are found, and returned, without touching the rest. A row that
keeps many is returned whole, with what it lost at -inf. What a row keeps depends on nothing but the
row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jubako.sampling.best_tokens import BestTokens, lower_bounds, tokens_from

IntArray = np.ndarray[Any, Any]
FloatArray = np.ndarray[Any, Any]

_FIRST_GUESS = 512
"""Best tokens that are looked at first where only top-p limits a row."""

_FEW = 4096
"""Rows that may keep more tokens than this are handled whole."""

_MASS_ROUNDING = 2.0**-23
"""A set whose float32 probabilities miss p by no more than this has the mass p."""

_FIXED_POINT = 2.0**52
_BUCKET_SHIFT = 15
"""Probabilities are sorted into buckets by sign, exponent and 8 bits of mantissa."""


class Selection(NamedTuple):
    """What top-k and top-p left; every row is in one of the two parts."""

    narrow_rows: IntArray
    narrow: BestTokens
    """Candidates of the narrow rows, -inf where a filter dropped the token."""
    wide_rows: IntArray
    wide_logits: Tensor
    """[w, V] of the wide rows, -inf where a filter dropped the token."""


def select_candidates(logits: Tensor, top_k: IntArray, top_p: FloatArray) -> Selection:
    """Apply top-k, then top-p, to every row of `logits` [n, V] float32.

    `top_k` [n] is V (or more) where unused, `top_p` [n] is 1 where unused. Top-k keeps all logits
    that are at least the k-th largest, equals included. Top-p keeps, in the distribution after
    top-k, the smallest set of best tokens with a mass of at least p, lower ids first among equals,
    and always the best token.
    """
    size = logits.shape[1]
    has_top_k = top_k < size
    bounds = lower_bounds(logits, np.where(has_top_k, top_k, _FIRST_GUESS))
    best, counts = tokens_from(logits, bounds, _FEW)
    best, complete = _filter_narrow(logits, best, top_k, top_p)
    narrow = complete & (counts <= _FEW).cpu().numpy()
    narrow_rows, wide_rows = narrow.nonzero()[0], (~narrow).nonzero()[0]
    if wide_rows.size:
        kept = torch.from_numpy(narrow_rows).to(logits.device)
        best = BestTokens(best.values[kept], best.token_ids[kept])
    wide_logits = logits[torch.from_numpy(wide_rows).to(logits.device)]
    for row, number in zip(wide_logits, wide_rows.tolist(), strict=True):
        _filter_wide(row, int(top_k[number]), float(top_p[number]))
    return Selection(narrow_rows, best, wide_rows, wide_logits)


_SUM_ERROR = 4e-6
"""Masses from a sum that was made elsewhere are told apart from a limit beyond this."""


def filter_top_p(
    best: BestTokens, log_sums: Tensor, top_p: FloatArray
) -> tuple[BestTokens, np.ndarray[Any, Any]]:
    """Apply top-p to the best tokens of rows of which the rest is not at hand.

    `log_sums` [n] float64 are logarithms of the sums of exponentials of whole rows. The mask [n]
    tells the rows for which that is certain to be what `select_candidates` keeps.
    """
    mass = (best.values.to(torch.float64) - log_sums.unsqueeze(1)).exp().cumsum(dim=1)
    limit = torch.from_numpy(_mass_limit(top_p)).unsqueeze(1)
    values = best.values.clone()
    values[:, 1:].masked_fill_(mass[:, :-1] >= limit, -torch.inf)
    sure = (mass[:, -1:] >= limit) & ~((mass - limit).abs() < _SUM_ERROR).any(dim=1, keepdim=True)
    return BestTokens(values, best.token_ids), sure.squeeze(1).numpy()


def _rows(logits: Tensor, index: Tensor) -> Tensor:
    return logits if len(index) == logits.shape[0] else logits[index]


def _mass_limit(top_p: FloatArray) -> FloatArray:
    """The mass that the tokens before one must not reach for it to be kept."""
    # An unused top_p must keep everything, whatever the sum rounds to.
    return np.where(top_p < 1, top_p.astype(np.float64) - _MASS_ROUNDING, np.inf)


def _filter_narrow(
    logits: Tensor, best: BestTokens, top_k: IntArray, top_p: FloatArray
) -> tuple[BestTokens, np.ndarray[Any, Any]]:
    """Filter the best tokens of each row; also says for each row whether nothing is missing."""
    device = logits.device
    values, ids = best
    has_top_k = top_k < logits.shape[1]
    limited = torch.from_numpy(has_top_k).to(device)
    complete = limited
    if has_top_k.any():
        last = np.minimum(np.where(has_top_k, top_k, values.shape[1]), values.shape[1]) - 1
        places = torch.from_numpy(last.astype(np.int64)).to(device).unsqueeze(1)
        values = values.masked_fill(values < values.gather(1, places), -torch.inf)
    if (top_p < 1).any():
        mass = _probabilities(logits, BestTokens(values, ids), limited).cumsum(dim=1)
        limit = torch.from_numpy(_mass_limit(top_p)).to(device).unsqueeze(1)
        values[:, 1:].masked_fill_(mass[:, :-1] >= limit, -torch.inf)
        complete = complete | (mass[:, -1:] >= limit).squeeze(1)
    return BestTokens(values, ids), complete.cpu().numpy()


def _probabilities(logits: Tensor, best: BestTokens, limited: Tensor) -> Tensor:
    """Float64 probabilities of the best tokens after top-k.

    Where top-k is active they are all there are, and are summed in order, which does not depend on
    how many columns there are. Elsewhere the row is normalised by one kernel call a row.
    """
    values = best.values.to(torch.float64)
    # Rows without any allowed token give -inf - -inf.
    weights = (values - values[:, :1]).exp().nan_to_num(0.0)
    result = weights / weights.cumsum(dim=1)[:, -1:].clamp(min=1e-300)
    whole = (~limited).nonzero().squeeze(1)
    if len(whole):
        softmax = torch.softmax(_rows(logits, whole), dim=1)
        found = softmax.gather(1, best.token_ids[whole]).to(torch.float64)
        result[whole] = found.where(best.values[whole] > -torch.inf, 0.0)
    return result


def _filter_wide(logits: Tensor, top_k: int, top_p: float) -> None:
    """Set dropped tokens of `logits` [V] to -inf in place."""
    if top_k < logits.shape[0]:
        logits.masked_fill_(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        limit = math.ceil(float(_mass_limit(np.array(top_p))) * _FIXED_POINT)
        # A top_p within rounding of 0 still keeps the best token.
        kept = _nucleus(torch.softmax(logits, dim=0).nan_to_num(0.0), max(limit, 1))
        logits.masked_fill_(~kept, -torch.inf)


def _nucleus(probabilities: Tensor, limit: int) -> Tensor:
    """Mask [V] of the best tokens with a mass of `limit` / 2^52, found without sorting them all.

    `limit` is at least 1.

    Masses are added up exactly, in fixed point, in buckets of nearly equal probability; only the
    bucket in which the limit falls is sorted.
    """
    fixed = (probabilities.to(torch.float64) * _FIXED_POINT).to(torch.int64)
    # The bits of non-negative floats are ordered as their values.
    buckets = probabilities.view(torch.int32) >> _BUCKET_SHIFT
    index = buckets.to(torch.int64)
    num_buckets = int(buckets.max()) + 1
    masses = fixed.new_zeros(num_buckets).scatter_add_(0, index, fixed)
    above = masses.flip(0).cumsum(0).flip(0) - masses
    boundary = int((above < limit).nonzero()[0])
    kept = buckets > boundary
    inside = (buckets == boundary).nonzero().squeeze(1)
    order = probabilities[inside].sort(descending=True, stable=True).indices
    inside = inside[order]
    before = above[boundary] + fixed[inside].cumsum(0) - fixed[inside]
    kept[inside[before < limit]] = True
    return kept
