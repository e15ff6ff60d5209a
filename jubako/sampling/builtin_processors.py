"""Which logits processors does every engine have?

Each touches only the tokens that its requests name: nothing of the vocabulary's size is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jubako.sampling.logits_processors import (
    AddedRow,
    LogitsProcessor,
    LogitsProcessors,
    LogitsRows,
    RowLogitsProcessor,
    TokenPatch,
)
from jubako.sampling.penalties import PenaltiesLogitsProcessor
from jubako.sampling.transcription import TranscriptionLogitsProcessor

Ids = np.ndarray[Any, Any]


def _forbid(logits: Tensor, rows: list[int], ids: list[Ids]) -> None:
    if rows:
        patch = TokenPatch.of(rows, ids, logits.device)
        logits[patch.rows, patch.token_ids] = -torch.inf


class AllowedTokensLogitsProcessor(RowLogitsProcessor[Ids]):
    """Only `allowed_token_ids` may be drawn."""

    def is_argmax_invariant(self) -> bool:
        return False

    def state_for(self, added: AddedRow) -> Ids | None:
        allowed = added.params.allowed_token_ids
        return None if allowed is None else self._valid_ids(allowed)

    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        for row, allowed in self.rows.items():
            if row in rows:
                target = logits[rows[row]]
                ids = torch.from_numpy(allowed).to(logits.device)
                kept = target[ids]
                target.fill_(-torch.inf)
                target[ids] = kept


class _BadWords(NamedTuple):
    single: Ids
    """Ids that are bad by themselves."""
    phrases: list[tuple[list[int], int]]
    """What the output must end with, and the id that is then bad."""
    output_token_ids: list[int]


class BadWordsLogitsProcessor(RowLogitsProcessor[_BadWords]):
    """The last token of a bad word is forbidden where the output ends with the rest of it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def state_for(self, added: AddedRow) -> _BadWords | None:
        words = [w for w in added.params.bad_words_token_ids or [] if w]
        words = [w for w in words if 0 <= w[-1] < self.vocab_size]
        if not words:
            return None
        single = self._valid_ids(w[0] for w in words if len(w) == 1)
        phrases = [(list(w[:-1]), w[-1]) for w in words if len(w) > 1]
        return _BadWords(single, phrases, added.output_token_ids)

    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        targets, ids = [], []
        for row, (single, phrases, output) in self.rows.items():
            if row not in rows:
                continue
            ends = [last for start, last in phrases if output[-len(start) :] == start]
            targets.append(rows[row])
            ids.append(np.concatenate([single, np.asarray(ends, dtype=np.int64)]))
        _forbid(logits, targets, ids)


class _MinTokens(NamedTuple):
    min_tokens: int
    stop_ids: Ids
    output_token_ids: list[int]

    @property
    def holds(self) -> bool:
        return len(self.output_token_ids) < self.min_tokens


class MinTokensLogitsProcessor(RowLogitsProcessor[_MinTokens]):
    """No token that could end the sequence before `min_tokens` tokens are out."""

    def is_argmax_invariant(self) -> bool:
        return False

    def state_for(self, added: AddedRow) -> _MinTokens | None:
        stop_ids = self._valid_ids(added.params.all_stop_token_ids)
        if not added.params.min_tokens or not stop_ids.size:
            return None
        return _MinTokens(added.params.min_tokens, stop_ids, added.output_token_ids)

    def active_rows(self) -> list[int]:
        return [row for row, state in self.rows.items() if state.holds]

    def is_active(self) -> bool:
        return any(state.holds for state in self.rows.values())

    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        held = [row for row in self.active_rows() if row in rows]
        _forbid(logits, [rows[row] for row in held], [self.rows[row].stop_ids for row in held])


class _Bias(NamedTuple):
    ids: Ids
    values: np.ndarray[Any, Any]


class LogitBiasLogitsProcessor(RowLogitsProcessor[_Bias]):
    """`logit_bias` is added to the logits of the tokens it names."""

    def is_argmax_invariant(self) -> bool:
        return False

    def state_for(self, added: AddedRow) -> _Bias | None:
        bias = added.params.logit_bias
        if not bias:
            return None
        ids = self._valid_ids(bias)
        return _Bias(ids, np.array([bias[int(i)] for i in ids], dtype=np.float32))

    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        states = [(rows[row], state) for row, state in self.rows.items() if row in rows]
        if states:
            patch = TokenPatch.of([r for r, _ in states], [s.ids for _, s in states], logits.device)
            values = torch.from_numpy(np.concatenate([s.values for _, s in states]))
            logits[patch.rows, patch.token_ids] += values.to(logits.device)


class MinPLogitsProcessor(RowLogitsProcessor[float]):
    """Tokens less likely than `min_p` times the most likely one are dropped."""

    def is_argmax_invariant(self) -> bool:
        return True

    def state_for(self, added: AddedRow) -> float | None:
        return added.params.min_p or None

    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        present = [row for row in self.rows if row in rows]
        if not present:
            return
        places = torch.as_tensor([rows[row] for row in present], device=logits.device)
        minimum = torch.tensor([self.rows[row] for row in present], device=logits.device)
        chosen = logits[places]
        # p < min_p * max p, taken to logits.
        limit = chosen.amax(dim=1, keepdim=True) + minimum.log().unsqueeze(1)
        logits[places] = chosen.masked_fill_(chosen < limit, -torch.inf)


def build_processors(
    config: Any,
    device: torch.device,
    custom: list[type[LogitsProcessor]] | None = None,
) -> LogitsProcessors:
    """Every processor in its normative place; `custom` ones follow those of their kind.

    Penalties stay last among those that change the most likely token.
    """
    own = [p(config, device) for p in custom or []]
    return LogitsProcessors(
        argmax_changing=[
            AllowedTokensLogitsProcessor(config, device),
            BadWordsLogitsProcessor(config, device),
            MinTokensLogitsProcessor(config, device),
            LogitBiasLogitsProcessor(config, device),
            TranscriptionLogitsProcessor(config, device),
            *(p for p in own if not p.is_argmax_invariant()),
            PenaltiesLogitsProcessor(config, device),
        ],
        argmax_invariant=[
            MinPLogitsProcessor(config, device),
            *(p for p in own if p.is_argmax_invariant()),
        ],
    )
