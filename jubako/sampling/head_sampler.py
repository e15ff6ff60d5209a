"""Which rows can have their token without logits, and which token is it?

A head that is looked through as it is computed leaves a few candidates of each row; the rest is
what the sampler does with logits, on these. Rows that cannot, and the rare ones that such a look
does not decide, get logits; the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jubako.kernels.cpu import head as native
from jubako.kernels.cpu.head_candidates import CandidateHead, Candidates
from jubako.sampling.best_tokens import BestTokens
from jubako.sampling.builtin_processors import MinPLogitsProcessor
from jubako.sampling.candidates import filter_top_p, select_candidates
from jubako.sampling.draw import draw_from_candidates
from jubako.sampling.logits_processors import apply_processors
from jubako.sampling.logprobs import logprobs_of_candidates, merge_logprobs
from jubako.sampling.metadata import NO_LOGPROBS, SamplingMetadata
from jubako.sampling.noise import noise_keys
from jubako.sampling.sampler import NO_NUMBERS, NOTHING_ALLOWED, Sampler, SamplerOutput
from jubako.scheduler.model_output import LogprobsLists

Array = np.ndarray[Any, Any]


_PAUSE = 16
"""Steps for which rows with a top-p alone get logits after most of them were not decided."""


class _Plan(NamedTuple):
    """How rows without logits are chosen; all [m]."""

    rows: Array
    """Which of the rows at hand they are."""
    greedy: Array
    top_k: Array
    """Random, with a top-k."""
    top_p: Array
    """Random, with a top-p alone; the others draw from the vocabulary."""


class HeadSampler:
    """Samples one token for each row of hidden states that it is given."""

    def __init__(self, head: CandidateHead, sampler: Sampler) -> None:
        self._head = head
        self._sampler = sampler
        self._steps_without_top_p = 0
        """Flat distributions keep more tokens than the head looks for: then it is not asked."""

    def __call__(
        self,
        hidden: Tensor,
        metadata: SamplingMetadata,
        batch_rows: Array,
        output_index: Array,
        logits_of: Callable[[Array], Tensor],
        allowed: Array | None = None,
    ) -> SamplerOutput:
        """As `Sampler`, from hidden states [r, h].

        `logits_of` makes logits of some of the rows, masked as `allowed` says: see
        `CandidateHead.find`.
        """
        without_top_p = self._steps_without_top_p > 0
        self._steps_without_top_p -= without_top_p
        plan = _plan(metadata, batch_rows, self._head.vocab_size, without_top_p)
        token_ids = torch.full((len(batch_rows),), -1, dtype=torch.int64)
        decided = np.zeros(len(batch_rows), dtype=bool)
        parts: list[tuple[LogprobsLists, Array]] = []
        if plan.rows.size:
            rows = batch_rows[plan.rows]
            some = len(plan.rows) < len(batch_rows)
            states = hidden[torch.from_numpy(plan.rows)] if some else hidden
            wanted = _wanted(plan, metadata, rows, output_index)
            masks = None if allowed is None else allowed[plan.rows]
            found = self._head.find(states, wanted, masks)
            chosen, is_decided = _choose(plan, found, metadata, rows, wanted)
            decided[plan.rows] = is_decided
            if 2 * np.count_nonzero(plan.top_p & ~is_decided) > np.count_nonzero(plan.top_p):
                self._steps_without_top_p = _PAUSE
            token_ids[torch.from_numpy(plan.rows)] = chosen
            asking = (is_decided & (metadata.num_logprobs[rows] != NO_LOGPROBS)).nonzero()[0]
            if asking.size:
                lists = logprobs_of_candidates(
                    _tensors(found, asking),
                    chosen[torch.from_numpy(asking)],
                    torch.from_numpy(found.sums[asking, 0]),
                    metadata.num_logprobs[rows[asking]],
                )
                parts.append((lists, plan.rows[asking]))
        rest = (~decided).nonzero()[0]
        if rest.size:
            output = self._sampler(logits_of(rest), metadata, batch_rows[rest], output_index)
            token_ids[torch.from_numpy(rest)] = output.token_ids
            if output.logprobs is not None:
                parts.append((output.logprobs, rest[output.logprob_rows]))
        logprobs, logprob_rows = merge_logprobs(parts)
        return SamplerOutput(token_ids, logprobs, logprob_rows)


def _plan(
    metadata: SamplingMetadata,
    batch_rows: Array,
    vocab_size: int,
    without_top_p: bool,
) -> _Plan:
    processors = metadata.logitsprocs
    greedy = metadata.greedy[batch_rows]
    top_k = metadata.top_k[batch_rows] <= min(native.MAX_COUNT, vocab_size - 1)
    limited = (metadata.top_p[batch_rows] < 1) & ~top_k
    logprobs = metadata.num_logprobs[batch_rows]
    able = (logprobs <= native.MAX_COUNT) & (
        greedy | top_k | (metadata.top_k[batch_rows] >= vocab_size)
    )
    # A token that was drawn from the vocabulary has no rank among candidates.
    able &= greedy | top_k | limited | (logprobs == NO_LOGPROBS)
    changed = processors.rows_with_changes(metadata.num_rows)
    if changed:
        able &= ~np.isin(batch_rows, list(changed))
    if without_top_p:
        able &= greedy | ~limited
    for processor in processors.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor):
            if processor.rows:
                # The best of a vocabulary's are candidates with a top-k only.
                able &= greedy | top_k | ~np.isin(batch_rows, list(processor.rows))
        elif processor.is_active():
            able &= greedy
    rows = able.nonzero()[0]
    greedy, limited = greedy[rows], limited[rows]
    return _Plan(rows, greedy, ~greedy & top_k[rows], ~greedy & limited)


def _wanted(
    plan: _Plan, metadata: SamplingMetadata, batch_rows: Array, output_index: Array
) -> Array:
    """What the head must look for, [m] of `native.ROW`."""
    wanted = np.zeros(len(batch_rows), native.ROW)
    asked = metadata.num_logprobs[batch_rows]
    count = np.maximum(np.where(plan.top_k, metadata.top_k[batch_rows], 1), asked)
    wanted["count"] = np.where(plan.top_p, native.MAX_COUNT, count)
    draws = ~(plan.greedy | plan.top_k | plan.top_p)
    flags = np.where(draws, native.DRAW, 0) | np.where(plan.top_p, native.SUM_SCALED, 0)
    wanted["flags"] = flags | np.where(asked != NO_LOGPROBS, native.SUM, 0)
    wanted["temperature"] = np.where(plan.greedy, 1, metadata.temperature[batch_rows])
    if not plan.greedy.all():
        keys = noise_keys(metadata.seeds[batch_rows], output_index[batch_rows])
        wanted["key"] = keys.numpy()
    return wanted


def _choose(
    plan: _Plan, found: Candidates, metadata: SamplingMetadata, batch_rows: Array, wanted: Array
) -> tuple[Tensor, Array]:
    """Token ids [m], and which of them stand."""
    chosen = torch.full((len(batch_rows),), NOTHING_ALLOWED, dtype=torch.int64)
    decided = found.found >= 0
    chosen[torch.from_numpy(found.found == native.NOT_NUMBERS)] = NO_NUMBERS
    decided |= found.found == native.NOT_NUMBERS
    usable = found.found > 0
    rows = (usable & plan.greedy).nonzero()[0]
    if rows.size:
        best = _tensors(found, rows)
        chosen[torch.from_numpy(rows)] = _token_at(best, best.values.argmax(dim=1))
    rows = (usable & ~plan.greedy).nonzero()[0]
    if not rows.size:
        return chosen, decided
    top_k = metadata.top_k[batch_rows[rows]]
    widths = np.where(plan.top_k[rows], top_k, 0)
    best = _tensors(found, rows, int(widths.max()) + 1)
    temperature = torch.from_numpy(metadata.temperature[batch_rows[rows]])
    scaled = best.values / temperature.unsqueeze(1)
    scaled = apply_processors(
        metadata.logitsprocs.argmax_invariant,
        scaled,
        batch_rows[rows].tolist(),
        metadata.num_rows,
    )
    best = BestTokens(scaled, best.token_ids)
    keys = torch.from_numpy(wanted["key"][rows].copy())
    top_p = metadata.top_p[batch_rows[rows]]
    by_top_k = plan.top_k[rows].nonzero()[0]
    if by_top_k.size:
        index = torch.from_numpy(by_top_k)
        kept = select_candidates(best.values[index], top_k[by_top_k], top_p[by_top_k]).narrow
        ids = best.token_ids[index].gather(1, kept.token_ids)
        tokens = draw_from_candidates(kept.values, ids, keys[index])
        chosen[torch.from_numpy(rows[by_top_k])] = tokens
    by_top_p = plan.top_p[rows].nonzero()[0]
    if by_top_p.size:
        index = torch.from_numpy(by_top_p)
        values, order = best.values[index].sort(dim=1, descending=True, stable=True)
        sorted_best = BestTokens(values, best.token_ids[index].gather(1, order))
        sums = torch.from_numpy(found.sums[rows[by_top_p], 1])
        kept, is_sure = filter_top_p(sorted_best, sums, top_p[by_top_p])
        tokens = draw_from_candidates(kept.values, kept.token_ids, keys[index])
        chosen[torch.from_numpy(rows[by_top_p])] = tokens
        decided[rows[by_top_p[~is_sure]]] = False
    free = (~(plan.top_k | plan.top_p)[rows]).nonzero()[0]
    if free.size:
        index = torch.from_numpy(free)
        tokens = draw_from_candidates(best.values[index], best.token_ids[index], keys[index])
        chosen[torch.from_numpy(rows[free])] = tokens
    return chosen, decided


def _tensors(found: Candidates, rows: Array, least: int = 1) -> BestTokens:
    """Candidates of some rows, ids ascending, in at least so many columns; the others are -inf."""
    counts = found.found[rows]
    width = min(max(int(counts.max()), least), found.ids.shape[1])
    empty = np.arange(width) >= counts[:, None]
    values = found.values[rows, :width]
    values[empty] = -np.inf
    ids = found.ids[rows, :width].astype(np.int64)
    ids[empty] = 0
    return BestTokens(torch.from_numpy(values), torch.from_numpy(ids))


def _token_at(best: BestTokens, places: Tensor) -> Tensor:
    return best.token_ids.gather(1, places.unsqueeze(1)).squeeze(1)
