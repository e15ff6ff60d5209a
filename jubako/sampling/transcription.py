"""Which tokens may a speech model write next?

As in "Robust Speech Recognition via Large-Scale Weak Supervision" (Radford et al., 2022): some
tokens never, and where times are wanted, they come in pairs, around each piece of text, and never
go back. Where times together are likelier than any text, a time is due.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jubako.sampling.logits_processors import AddedRow, LogitsRows, RowLogitsProcessor
from jubako.sampling_params import TranscriptionRules


class _Speech(NamedTuple):
    rules: TranscriptionRules
    never: Tensor
    """int64 [n], on the logits' device; so is `not_first`."""
    not_first: Tensor
    written_before: list[int]
    """The time at the end of the prompt, which counts as written."""
    output_token_ids: list[int]


class TranscriptionLogitsProcessor(RowLogitsProcessor[_Speech]):
    """The rules of `SamplingParams.transcription`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def state_for(self, added: AddedRow) -> _Speech | None:
        rules = added.params.transcription
        if rules is None:
            return None
        first, last = rules.first_timestamp, added.prompt_token_ids[-1:]
        timed = [token for token in last if first is not None and token >= first]
        return _Speech(
            rules,
            self._on_device(rules.suppress_tokens),
            self._on_device(rules.begin_suppress_tokens),
            timed,
            added.output_token_ids,
        )

    def _on_device(self, token_ids: list[int]) -> Tensor:
        ids: np.ndarray = self._valid_ids(token_ids)
        return torch.from_numpy(ids).to(self.device)

    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        for row, state in self.rows.items():
            if row not in rows:
                continue
            target = logits[rows[row]]
            target[state.never] = -torch.inf
            if not state.written_before and not state.output_token_ids:
                target[state.not_first] = -torch.inf
            if state.rules.first_timestamp is not None:
                _keep_times_in_order(target, state, state.rules.first_timestamp)


def _keep_times_in_order(logits: Tensor, state: _Speech, first: int) -> None:
    """Forbid in `logits` [V] what would break the order of times."""
    written = state.output_token_ids
    # The last two tokens decide, and the last time.
    tail = [*state.written_before, *written[-2:]] if len(written) < 2 else written[-2:]
    logits[first - 1] = -torch.inf  # the token that wants no times
    if tail and tail[-1] >= first:
        if len(tail) < 2 or tail[-2] >= first:
            logits[first:] = -torch.inf
        else:
            logits[: state.rules.end_token_id] = -torch.inf
    last = next((t for t in reversed([*state.written_before, *written]) if t >= first), None)
    if last is not None:
        # The time that ends a text may begin the next one; else time goes on.
        is_end = tail[-1] >= first and len(tail) > 1 and tail[-2] < first
        logits[first : last if is_end else last + 1] = -torch.inf
    probable = logits.log_softmax(dim=-1)
    if probable[first:].logsumexp(dim=-1) > probable[:first].max():
        logits[:first] = -torch.inf
