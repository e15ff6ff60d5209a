"""Which tokens of a row have the largest logits, without sorting the vocabulary?

The maxima of V/64 groups of tokens are found first. At least k tokens reach the k-th largest of
these maxima, so it is a lower bound of the k-th largest logit, and the few tokens that reach it are
all that need to be sorted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

IntArray = np.ndarray[Any, Any]

_GROUP = 64
_CHUNK_ROWS = 4
"""Rows that are converted to float32 at a time; their copies stay in a processor's cache."""


class BestTokens(NamedTuple):
    """Best tokens of some rows, best first, equals by ascending id.

    `values` [n, k] float32 ends with -inf in rows that have fewer; `token_ids` [n, k] int64.
    """

    values: Tensor
    token_ids: Tensor


def argmax_tokens(logits: Tensor) -> Tensor:
    """The id [n] int64 of the largest of `logits` [n, V], the lowest among equals."""
    if logits.device.type != "cpu" or logits.dtype == torch.float32:
        return logits.argmax(dim=-1)
    # On a CPU argmax of short floats takes five times as long as of float32.
    parts = [part.float().argmax(dim=-1) for part in logits.split(_CHUNK_ROWS)]
    return torch.cat(parts)


def lower_bounds(logits: Tensor, counts: IntArray) -> Tensor:
    """For each row of `logits` [n, V] a finite value [n, 1] that its `counts[i]` best tokens reach.

    Tokens at -inf do not count.
    """
    size = logits.shape[1]
    counts = np.clip(counts, 1, size).astype(np.int64)
    bounds = logits.new_empty(logits.shape[0], 1)
    grouped = counts * _GROUP <= size
    for in_groups in (True, False):
        rows = (grouped == in_groups).nonzero()[0]
        if not rows.size:
            continue
        index = torch.from_numpy(rows).to(logits.device)
        part = logits if len(rows) == len(counts) else logits[index]
        if in_groups:
            width = size // _GROUP
            part = part[:, : width * _GROUP].unflatten(1, (_GROUP, width)).amax(dim=1)
        wanted = torch.from_numpy(counts[rows]).to(logits.device).unsqueeze(1)
        largest = part.topk(int(counts[rows].max()), dim=1).values
        bounds[index] = largest.gather(1, wanted - 1)
    return bounds.clamp_(min=torch.finfo(logits.dtype).min)


def tokens_from(logits: Tensor, bounds: Tensor, most: int) -> tuple[BestTokens, Tensor]:
    """All tokens of `logits` [n, V] that reach `bounds` [n, 1], and how many these are, [n].

    Rows with more than `most` of them are left empty. There is at least one column.
    """
    rows, ids = (logits >= bounds).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=logits.shape[0])
    taken = counts.masked_fill(counts > most, 0)
    if len(rows) > int(taken.sum()):
        in_taken = taken[rows] > 0
        rows, ids = rows[in_taken], ids[in_taken]
    values, token_ids = pack_rows(logits, rows, ids, taken)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return BestTokens(values, token_ids.gather(1, order)), counts


def pack_rows(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and ids [n, k] of chosen entries of `logits` [n, V], those of a row from the left.

    `rows` [m], ascending, and `ids` [m] name the entries, `counts` [n] how many each row has; k is
    the most of them, at least 1. Empty places have -inf and id 0.
    """
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(rows), device=logits.device) - starts[rows]
    shape = (logits.shape[0], max(1, int(counts.max())))
    values = torch.full(shape, -torch.inf, dtype=logits.dtype, device=logits.device)
    token_ids = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    values[rows, places] = logits[rows, ids]
    token_ids[rows, places] = ids
    return values, token_ids


def best_tokens(logits: Tensor, counts: IntArray) -> BestTokens:
    """At least the `counts[i]` best tokens of each row of float32 `logits` [n, V].

    All that equal the last of them are included.
    """
    return tokens_from(logits, lower_bounds(logits, counts), logits.shape[1])[0]
