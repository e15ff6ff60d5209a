"""How is each row of the batch sampled? One object for the batch, rebuilt when its rows change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jubako.sampling.logits_processors import LogitsProcessors

Array = np.ndarray[Any, Any]

NO_LOGPROBS = -1
"""`num_logprobs` of a row that asked for none."""


@dataclass
class SamplingMetadata:
    """Sampling parameters of `n` batch rows. All arrays are [n] and on the host.

    They are copies: a later change of the batch does not reach a step that is being sampled.
    """

    temperature: Array
    """float32; 0 where greedy."""
    top_k: Array
    """int32; the size of the vocabulary where unused."""
    top_p: Array
    """float32; 1 where unused."""
    seeds: Array
    """uint64."""
    num_logprobs: Array
    """int32: logprobs beside the sampled token, `NO_LOGPROBS` where none are wanted."""
    all_greedy: bool
    all_random: bool
    no_top_k: bool
    no_top_p: bool
    no_penalties: bool
    max_num_logprobs: int | None
    """Most logprobs of any row; None if no row wants any."""
    output_token_ids: list[list[int]]
    """The requests' live output lists."""
    logitsprocs: LogitsProcessors

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.temperature)

    @property
    def greedy(self) -> Array:
        """bool: rows that take the most likely token."""
        return self.temperature == 0
