"""What does a step tell the attention kernels about its requests?"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class AttentionMetadata:
    """One step, seen by the attention layers of one KV cache group.

    `n` requests in batch order share `T` flattened tokens; request `i` owns the tokens from
    `query_start_loc[i]` to `query_start_loc[i + 1]`. Its context, this step's tokens included, is
    `seq_lens[i]` long, and the KV of position `p` lies in block `block_table_tensor[i, p // B]` at
    offset `p % B`. Sink tokens, where a group has them, count as its first positions, in context
    and table alike, so that attention need not know of them. Names are those of vLLM's
    `CommonAttentionMetadata`. Every step makes new ones: what kernels derive from the fields is
    kept in `plans`.
    """

    query_start_loc: torch.Tensor
    """[n + 1] int32."""
    query_start_loc_cpu: np.ndarray
    """The same on the host."""
    seq_lens: torch.Tensor
    """[n] int32."""
    seq_lens_cpu: np.ndarray
    """The same on the host."""
    num_reqs: int
    num_actual_tokens: int
    """Tokens beyond this count are padding: their KV is not written, their output is undefined."""
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    """[n, blocks] int32; entries past a request's last block are undefined."""
    block_table_cpu: np.ndarray
    """The same on the host."""
    slot_mapping: torch.Tensor
    """[T] int64: block · B + offset where the token's KV goes; negative: nowhere."""
    causal: bool = True
    slot_mapping_cpu: np.ndarray | None = None
    """The slots on the host. Without it a kernel on another device may have to wait for them."""
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """What a kernel derived from the fields above, kept for the other layers of the step."""

    @classmethod
    def both_ways(
        cls,
        query_start_loc_cpu: np.ndarray,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> AttentionMetadata:
        """Of whole sequences whose tokens see all of their own; nothing is kept of them."""
        lengths = np.diff(query_start_loc_cpu)
        total, longest = int(query_start_loc_cpu[-1]), int(lengths.max(initial=0))
        blocks: np.ndarray = np.zeros((len(lengths), 0), np.int32)
        slots: np.ndarray = np.full(total, -1, np.int64)
        return cls(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens=seq_lens,
            seq_lens_cpu=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=total,
            max_query_len=longest,
            max_seq_len=longest,
            block_table_tensor=torch.from_numpy(blocks),
            block_table_cpu=blocks,
            slot_mapping=torch.from_numpy(slots),
            causal=False,
            slot_mapping_cpu=slots,
        )
