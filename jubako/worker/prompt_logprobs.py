"""How likely was each token of a prompt, given what precedes it?

Filled chunk by chunk as the prompt is computed. The object lives in the request's state, so a
request that sits out a step or is preempted keeps what it has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from jubako.sampling.logprobs import gather_logprobs
from jubako.scheduler.model_output import LogprobsLists

_CHUNK_ENTRIES = 1 << 23
"""Logits that exist at a time."""


class PromptLogprobs:
    """Logprobs of prompt tokens 1 to P-1: row i scores token i+1 from position i."""

    def __init__(self, prompt_token_ids: list[int], num_logprobs: int, vocab_size: int) -> None:
        """`num_logprobs` best tokens beside the prompt's own."""
        self._next_ids = np.asarray(prompt_token_ids[1:], dtype=np.int64)
        self._count = num_logprobs
        self._vocab_size = vocab_size
        rows, columns = len(self._next_ids), num_logprobs + 1
        self._lists = LogprobsLists(
            np.zeros((rows, columns), dtype=np.int32),
            np.zeros((rows, columns), dtype=np.float32),
            np.zeros(rows, dtype=np.int32),
        )
        self._lists.logprob_token_ids[:, 0] = self._next_ids

    def fill(
        self,
        hidden: Tensor,
        num_computed: int,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> bool:
        """Score from `hidden` [t, h] of positions `num_computed` and following.

        Returns whether the whole prompt has been computed now.
        """
        end = min(num_computed + hidden.shape[0], len(self._next_ids))
        step = max(1, _CHUNK_ENTRIES // self._vocab_size)
        for start in range(num_computed, end, step):
            stop = min(start + step, end)
            logits = compute_logits(hidden[start - num_computed : stop - num_computed])
            chosen = torch.from_numpy(self._next_ids[start:stop]).to(logits.device)
            scored = gather_logprobs(logits, chosen, np.full(stop - start, self._count))
            self._lists.logprob_token_ids[start:stop] = scored.logprob_token_ids
            self._lists.logprobs[start:stop] = scored.logprobs
            self._lists.sampled_token_ranks[start:stop] = scored.sampled_token_ranks
        return num_computed + hidden.shape[0] > len(self._next_ids)

    def result(self) -> LogprobsLists:
        """All rows, [P-1, num_logprobs + 1]."""
        return self._lists
