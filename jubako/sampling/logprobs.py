"""How likely were the sampled token and the best ones?

Logprobs are float32 `log_softmax` of raw logits. Only rows that asked are looked at, and each only
as far as it asked, so one request that wants the whole vocabulary costs its neighbours nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from jubako.sampling.best_tokens import BestTokens, best_tokens
from jubako.scheduler.model_output import LogprobsLists

_CHUNK_ENTRIES = 1 << 21
"""Logits that are held in float32 at a time: 8 MiB."""


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: np.ndarray[Any, Any]
) -> LogprobsLists:
    """Logprobs for rows of raw `logits` [m, V], any float type.

    Column 0 belongs to `token_ids` [m] int64; then follow the `num_logprobs[i]` best tokens of row
    i. Arrays are as wide as the widest row; `row_widths` tells each row's own columns. The rank of
    a token is the number of tokens that are at least as likely, so equals count against it.
    """
    rows = logits.shape[0]
    result = _empty_lists(num_logprobs)
    step = max(1, _CHUNK_ENTRIES // logits.shape[1])
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        _gather_chunk(logits[part], token_ids[part], num_logprobs[part], start, result)
    return result


def _empty_lists(num_logprobs: np.ndarray[Any, Any]) -> LogprobsLists:
    rows, width = len(num_logprobs), int(num_logprobs.max(initial=0)) + 1
    # Fresh zero pages: what a narrow row does not fill costs nothing.
    return LogprobsLists(
        np.zeros((rows, width), dtype=np.int32),
        np.zeros((rows, width), dtype=np.float32),
        np.zeros(rows, dtype=np.int32),
        row_widths=[int(count) + 1 for count in num_logprobs],
    )


def logprobs_of_candidates(
    candidates: BestTokens,
    token_ids: Tensor,
    log_sums: Tensor,
    num_logprobs: np.ndarray[Any, Any],
) -> LogprobsLists:
    """As `gather_logprobs`, from candidates: logits [m, k] with ascending ids.

    Those of a row are all that are as likely as its token or its best ones. `log_sums` [m] float64
    are the logarithms of the sums of exponentials of whole rows.
    """
    values, order = candidates.values.sort(dim=1, descending=True, stable=True)
    ids = candidates.token_ids.gather(1, order)
    is_chosen = (ids == token_ids.unsqueeze(1)) & (values > -torch.inf)
    chosen = values.masked_fill(~is_chosen, -torch.inf).amax(dim=1, keepdim=True)
    best = BestTokens(values, ids)
    scored = (values.to(torch.float64) - log_sums.unsqueeze(1)).to(torch.float32)
    result = _empty_lists(num_logprobs)
    result.logprob_token_ids[:, 0] = token_ids.numpy()
    result.logprobs[:, 0] = (chosen.squeeze(1).to(torch.float64) - log_sums).numpy()
    result.sampled_token_ranks[:] = (values >= chosen).sum(dim=1).numpy()
    _fill_best(result, best, scored, num_logprobs, 0)
    return result


def merge_logprobs(
    parts: list[tuple[LogprobsLists, np.ndarray[Any, Any]]],
) -> tuple[LogprobsLists | None, np.ndarray[Any, Any]]:
    """Lists of different rows as one, by ascending row, and the rows."""
    if len(parts) < 2:
        return parts[0] if parts else (None, np.empty(0, dtype=np.int64))
    rows = np.concatenate([own for _, own in parts])
    order = rows.argsort()
    widths = np.concatenate([lists.row_widths or [] for lists, _ in parts]).astype(np.int64)
    merged = _empty_lists(widths - 1)
    start = 0
    for lists, own in parts:
        there = slice(start, start + len(own))
        columns = lists.logprobs.shape[1]
        merged.logprob_token_ids[there, :columns] = lists.logprob_token_ids
        merged.logprobs[there, :columns] = lists.logprobs
        merged.sampled_token_ranks[there] = lists.sampled_token_ranks
        start += len(own)
    return LogprobsLists(
        merged.logprob_token_ids[order],
        merged.logprobs[order],
        merged.sampled_token_ranks[order],
        row_widths=widths[order].tolist(),
    ), rows[order]


def _gather_chunk(
    logits: Tensor,
    token_ids: Tensor,
    num_logprobs: np.ndarray[Any, Any],
    first_row: int,
    result: LogprobsLists,
) -> None:
    logits = logits.to(torch.float32)
    logprobs = logits.log_softmax(dim=-1)
    chosen = token_ids.unsqueeze(1)
    rows = slice(first_row, first_row + logits.shape[0])
    result.logprob_token_ids[rows, 0] = token_ids.cpu().numpy()
    result.logprobs[rows, 0] = logprobs.gather(1, chosen).squeeze(1).cpu().numpy()
    # Ranks come from logits, because log_softmax may round neighbours to one value. They are
    # counted in float32, which is exact up to 2^24 and the fastest sum there is.
    at_least = torch.ge(logits, logits.gather(1, chosen), out=torch.empty_like(logits))
    result.sampled_token_ranks[rows] = at_least.sum(dim=1).cpu().numpy()
    wanted = num_logprobs.max(initial=0)
    if not wanted:
        return
    best = best_tokens(logits, num_logprobs)
    _fill_best(result, best, logprobs.gather(1, best.token_ids), num_logprobs, first_row)


def _fill_best(
    result: LogprobsLists,
    best: BestTokens,
    logprobs: Tensor,
    num_logprobs: np.ndarray[Any, Any],
    first_row: int,
) -> None:
    """Fill all but the first columns with the best tokens and their logprobs [m, k]."""
    values, ids = best.values.cpu().numpy(), best.token_ids.cpu().numpy()
    scored = logprobs.cpu().numpy()
    for row, count in enumerate(num_logprobs.tolist()):
        # Fewer than asked for may be possible at all; impossible ones follow.
        found = min(count, int(np.count_nonzero(values[row] > -np.inf)))
        first, last = slice(1, found + 1), slice(found + 1, count + 1)
        number = first_row + row
        result.logprob_token_ids[number, first] = ids[row, :found]
        result.logprobs[number, first] = scored[row, :found]
        if found < count:
            others = np.setdiff1d(np.arange(count), ids[row, :found])[: count - found]
            result.logprob_token_ids[number, last] = others
            result.logprobs[number, last] = -np.inf
