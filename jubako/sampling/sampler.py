"""Which token comes next in each row?

The stages and their order: raw snapshot for logprobs; allowed tokens, bad words, min-tokens, logit
bias and custom processors, penalties; greedy choice; temperature; min-p and custom processors that
keep the best token; top-k; top-p; random draw; logprobs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jubako.sampling.best_tokens import argmax_tokens
from jubako.sampling.candidates import select_candidates
from jubako.sampling.draw import draw_from_candidates, draw_from_vocabulary
from jubako.sampling.logits_processors import apply_processors
from jubako.sampling.logprobs import gather_logprobs
from jubako.sampling.metadata import NO_LOGPROBS, SamplingMetadata
from jubako.sampling.noise import noise_keys
from jubako.scheduler.model_output import LogprobsLists

Rows = np.ndarray[Any, np.dtype[np.int64]]

NOTHING_ALLOWED = -1
"""Instead of a token: everything is forbidden."""
NO_NUMBERS = -2
"""Instead of a token: a logit is NaN."""

NO_TOKEN = {
    NOTHING_ALLOWED: "No token is allowed to come next: what is asked for excludes all of the "
    "vocabulary. Check allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar.",
    NO_NUMBERS: "The model's logits are not numbers (NaN). The weights may be damaged, or their "
    "dtype too narrow for them; try dtype float32.",
}
"""What to tell the caller."""


class SamplerOutput(NamedTuple):
    """`token_ids` [r] int64, or a reason of `NO_TOKEN`; `logprobs` has one row for each of
    `logprob_rows`, None if none."""

    token_ids: Tensor
    logprobs: LogprobsLists | None
    logprob_rows: Rows
    """Rows of the logits whose requests asked for logprobs, ascending."""


def takes_best_tokens(metadata: SamplingMetadata, batch_rows: Rows) -> bool:
    """Whether every row just takes the token with the largest of the model's own logits."""
    return (
        metadata.max_num_logprobs is None
        and not metadata.logitsprocs.rows_with_changes(metadata.num_rows)
        and (metadata.all_greedy or bool(metadata.greedy[batch_rows].all()))
    )


class Sampler:
    """Samples one token for each row of logits that it is given."""

    def __call__(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        batch_rows: Rows,
        output_index: np.ndarray[Any, Any],
    ) -> SamplerOutput:
        """Sample from `logits` [r, V], which may be overwritten.

        Row i belongs to batch row `batch_rows[i]`; batch rows without logits do not take part.
        `output_index` [n] is, per batch row, how many tokens the request has put out.
        """
        wanted = metadata.num_logprobs[batch_rows]
        logprob_rows = (wanted != NO_LOGPROBS).nonzero()[0]
        raw = logits[_index(logprob_rows, logits)] if logprob_rows.size else None
        token_ids = self._sample(logits, metadata, batch_rows, output_index)
        logprobs = None
        if raw is not None:
            chosen = token_ids[_index(logprob_rows, logits)].clamp(min=0)
            logprobs = gather_logprobs(raw, chosen, wanted[logprob_rows])
        return SamplerOutput(token_ids, logprobs, logprob_rows)

    def _sample(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        batch_rows: Rows,
        output_index: np.ndarray[Any, Any],
    ) -> Tensor:
        changed = metadata.logitsprocs.rows_with_changes(metadata.num_rows)
        greedy = metadata.greedy[batch_rows]
        if not changed and greedy.all():
            return _best(logits)

        # Greedy rows that no processor changes are looked at once, in the model's own type.
        plain = greedy.copy()
        if changed:
            plain &= ~np.isin(batch_rows, list(changed))
        token_ids = torch.empty(len(batch_rows), dtype=torch.int64, device=logits.device)
        if plain.any():
            rows = plain.nonzero()[0]
            token_ids[_index(rows, logits)] = _best(_take(logits, rows))
        work = (~plain).nonzero()[0]
        if not work.size:
            return token_ids

        chosen = _take(logits, work).to(torch.float32)
        work_rows = batch_rows[work]
        processors = metadata.logitsprocs
        chosen = apply_processors(
            processors.argmax_changing, chosen, work_rows.tolist(), metadata.num_rows
        )
        for is_greedy in (True, False):
            part = (greedy[work] == is_greedy).nonzero()[0]
            if not part.size:
                continue
            part_logits = _take(chosen, part)
            if is_greedy:
                drawn = _best(part_logits)
            else:
                drawn = self._draw(part_logits, metadata, work_rows[part], output_index)
            token_ids[_index(work[part], logits)] = drawn
        return token_ids

    def _draw(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        batch_rows: Rows,
        output_index: np.ndarray[Any, Any],
    ) -> Tensor:
        """Token ids [m] drawn from float32 `logits` [m, V], which are overwritten."""
        temperature = torch.from_numpy(metadata.temperature[batch_rows]).to(logits.device)
        logits.div_(temperature.unsqueeze(1))
        logits = apply_processors(
            metadata.logitsprocs.argmax_invariant, logits, batch_rows.tolist(), metadata.num_rows
        )
        keys = noise_keys(metadata.seeds[batch_rows], output_index[batch_rows]).to(logits.device)
        top_k, top_p = metadata.top_k[batch_rows], metadata.top_p[batch_rows]
        drawn = torch.empty(len(batch_rows), dtype=torch.int64, device=logits.device)
        best = logits.amax(dim=1)

        filtered = (top_k < logits.shape[1]) | (top_p < 1)
        free = (~filtered).nonzero()[0]
        if free.size:
            rows = _index(free, logits)
            drawn[rows] = draw_from_vocabulary(_take(logits, free), keys[rows])
        limited = filtered.nonzero()[0]
        if limited.size:
            found = select_candidates(_take(logits, limited), top_k[limited], top_p[limited])
            if found.narrow_rows.size:
                rows = _index(limited[found.narrow_rows], logits)
                narrow = found.narrow
                drawn[rows] = draw_from_candidates(narrow.values, narrow.token_ids, keys[rows])
            if found.wide_rows.size:
                rows = _index(limited[found.wide_rows], logits)
                drawn[rows] = draw_from_vocabulary(found.wide_logits, keys[rows])
        return _unless_none(drawn, best)


def _best(logits: Tensor) -> Tensor:
    token_ids = argmax_tokens(logits)
    return _unless_none(token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1))


def _unless_none(token_ids: Tensor, best: Tensor) -> Tensor:
    """The ids [m], but reasons where the `best` logit [m] of a row is none."""
    token_ids = token_ids.masked_fill_(best == -torch.inf, NOTHING_ALLOWED)
    return token_ids.masked_fill_(best.isnan(), NO_NUMBERS)


def _index(rows: Rows, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _take(logits: Tensor, rows: Rows) -> Tensor:
    """Rows of `logits`, without a copy when they are all of them."""
    return logits if len(rows) == logits.shape[0] else logits[_index(rows, logits)]
