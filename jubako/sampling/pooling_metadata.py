"""What does pooling know about the requests of a step?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jubako.sampling_params import PoolingParams

IntArray = np.ndarray[Any, Any]


class PoolingStates:
    """Hidden states of a prompt that is computed in chunks, for a request that wants all of them.

    They are kept by position, so that chunks may be computed again after a preemption.
    """

    def __init__(self) -> None:
        self._hidden: Tensor | None = None

    def add(self, hidden: Tensor, start: int, prompt_len: int) -> Tensor:
        """Add those [m, h] of positions from `start`; all so far, [prompt_len, h].

        What has not been computed yet is undefined. A prompt in one chunk is not copied.
        """
        if self._hidden is None:
            if hidden.shape[0] == prompt_len:
                return hidden
            self._hidden = hidden.new_empty(prompt_len, hidden.shape[1])
        self._hidden[start : start + hidden.shape[0]] = hidden
        return self._hidden


@dataclass(frozen=True)
class PoolingCursor:
    """Where the requests' tokens lie in a step. Row i has `ends[i] - starts[i]` of them."""

    starts: IntArray
    """[n]: first token of each row in the step's hidden states."""
    ends: IntArray
    """[n]: the token behind the last one."""
    computed: IntArray
    """[n]: prompt positions before this step's."""


@dataclass(frozen=True)
class PoolingMetadata:
    """The requests of a step, row by row."""

    prompt_lens: IntArray
    """[n]."""
    prompt_token_ids: Sequence[Sequence[int]]
    pooling_params: Sequence[PoolingParams]
    pooling_states: Sequence[PoolingStates]
    cursor: PoolingCursor

    def finished_rows(self) -> IntArray:
        """Rows whose prompt ends in this step; only they have an output."""
        cursor = self.cursor
        return (cursor.computed + cursor.ends - cursor.starts == self.prompt_lens).nonzero()[0]

    def mean(self, hidden: Tensor, rows: IntArray) -> Tensor:
        """The mean of the hidden states [T, h] of each of `rows`, summed in float32: [r, h]."""
        lengths = torch.from_numpy((self.cursor.ends - self.cursor.starts)[rows].astype(np.int64))
        lengths = lengths.to(hidden.device)
        parts = [hidden[self.cursor.starts[row] : self.cursor.ends[row]] for row in rows.tolist()]
        owner = torch.arange(len(rows), device=hidden.device).repeat_interleave(lengths)
        sums = torch.zeros(len(rows), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        sums.index_add_(0, owner, torch.cat(parts).float())
        return sums / lengths[:, None]
