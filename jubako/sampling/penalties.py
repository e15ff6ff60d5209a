"""How do the tokens that a request already has change the logits of its next one?

Only tokens that occur are counted and touched; no array of the vocabulary's size exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from jubako.sampling.logits_processors import (
    AddedRow,
    LogitsRows,
    RowLogitsProcessor,
    TokenPatch,
)


class OccurringTokens:
    """The distinct tokens of a request and how often each is in its output, kept as it grows."""

    def __init__(self, prompt_ids: np.ndarray[Any, Any], output_token_ids: list[int]) -> None:
        """`prompt_ids` are distinct; `output_token_ids` is the request's live list."""
        self._prompt_ids = prompt_ids
        self._output = output_token_ids
        self._restart()

    def _restart(self) -> None:
        self._place = {int(token): i for i, token in enumerate(self._prompt_ids)}
        self._size = len(self._place)
        self._ids = np.zeros(self._size + 64, dtype=np.int64)
        self._ids[: self._size] = self._prompt_ids
        self._counts = np.zeros(self._size + 64, dtype=np.float32)
        self._seen = 0
        self._last = -1

    def counts(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Ids [m] int64 and their counts in the output [m] float32, up to date."""
        output = self._output
        if self._seen and (len(output) < self._seen or output[self._seen - 1] != self._last):
            # Outputs were taken back, and perhaps replaced.
            self._restart()
        for token in output[self._seen :]:
            self._count(token)
        self._seen = len(output)
        self._last = output[-1] if output else -1
        return self._ids[: self._size], self._counts[: self._size]

    def _count(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


class _Penalties:
    def __init__(self, added: AddedRow, prompt_ids: np.ndarray[Any, Any]) -> None:
        self.repetition = added.params.repetition_penalty
        self.frequency = added.params.frequency_penalty
        self.presence = added.params.presence_penalty
        self.tokens = OccurringTokens(prompt_ids, added.output_token_ids)


class PenaltiesLogitsProcessor(RowLogitsProcessor[_Penalties]):
    """Repetition, frequency and presence penalties, in this order.

    Repetition r, for tokens of prompt or output: a positive logit is divided by r, any other
    multiplied (Keskar et al., CTRL, 2019). Then `frequency * count` and `presence * [count > 0]`
    are subtracted, with counts in the output (OpenAI's interface).
    """

    def is_argmax_invariant(self) -> bool:
        return False

    def state_for(self, added: AddedRow) -> _Penalties | None:
        params = added.params
        repeats = params.repetition_penalty != 1
        if not (repeats or params.frequency_penalty or params.presence_penalty):
            return None
        prompt = added.prompt_token_ids if repeats else []
        return _Penalties(added, self._valid_ids(prompt))

    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        states = [(rows[row], state) for row, state in self.rows.items() if row in rows]
        counted = [state.tokens.counts() for _, state in states]
        if not any(len(ids) for ids, _ in counted):
            return
        patch = TokenPatch.of([r for r, _ in states], [ids for ids, _ in counted], logits.device)
        counts = torch.from_numpy(np.concatenate([c for _, c in counted])).to(logits.device)
        repetition = patch.per_entry([state.repetition for _, state in states])
        frequency = patch.per_entry([state.frequency for _, state in states])
        presence = patch.per_entry([state.presence for _, state in states])
        values = logits[patch.rows, patch.token_ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits[patch.rows, patch.token_ids] = values
