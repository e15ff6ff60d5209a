"""Where does a step find the recurrent state of each request, and where does it leave it?"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StateSlots:
    """One step, seen by the recurrent layers of one KV cache group. All arrays are int64.

    `n` requests in batch order share `T` flattened tokens; request `i` owns the tokens from
    `query_start_loc[i]` to `query_start_loc[i + 1]`. Kernels read a request's state in one block
    and write it to another, or to the same: nothing is copied between steps.
    """

    query_start_loc: IntArray
    """[n + 1]."""
    read_blocks: IntArray
    """[n]: the block with the state before the request's first token of this step; -1: it starts
    from zeros, whatever any block contains."""
    write_requests: IntArray
    """[w]: requests whose state is kept. One may occur several times, with later tokens later."""
    write_tokens: IntArray
    """[w]: the token, of the T, after which the state is taken."""
    write_blocks: IntArray
    """[w]: the block that takes it. No two are equal."""
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """What a kernel derived from the fields above, kept for the other layers of the step."""

    @classmethod
    def without_state(cls, num_tokens: int) -> StateSlots:
        """One request of `num_tokens` tokens that starts from zeros and leaves nothing."""
        none: IntArray = np.zeros(0, np.int64)
        return cls(np.array([0, num_tokens]), np.array([-1]), none, none, none)

    @property
    def query_lens(self) -> IntArray:
        """[n]: tokens of each request."""
        return np.diff(self.query_start_loc)
