"""How does a grammar's mask reach the right rows of the logits?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jubako.scheduler.output import GrammarOutput


def mask_addresses(
    grammar: GrammarOutput, req_ids: Sequence[str]
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Where the mask of each request's next token lies in memory, [r]; 0 for one without a mask.

    Without drafts. The addresses hold while `grammar.grammar_bitmask` lives.
    """
    masks = grammar.grammar_bitmask
    assert masks.flags.c_contiguous
    base, size = masks.ctypes.data, masks.strides[0]
    of_request = {
        request_id: base + i * size
        for i, request_id in enumerate(grammar.structured_output_request_ids)
    }
    return np.array([of_request.get(request_id, 0) for request_id in req_ids], np.uint64)


def apply_grammar_mask(
    logits: Tensor,
    grammar: GrammarOutput,
    logits_row_of: Mapping[str, int],
    num_drafts: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Set disallowed logits [r, V] to -inf in place.

    `grammar.grammar_bitmask` has int32 words, lowest bit first, a set bit allows the token; rows
    come in the order of the listed requests, 1 + drafts each. `logits_row_of` gives the first
    logits row of a request; listed requests without one are skipped, other rows stay untouched.
    """
    size = logits.shape[1]
    start = 0
    for request_id in grammar.structured_output_request_ids:
        count = 1 + len((num_drafts or {}).get(request_id, ()))
        words = grammar.grammar_bitmask[start : start + count]
        start += count
        row = logits_row_of.get(request_id)
        if row is None:
            continue
        little_endian = np.ascontiguousarray(words).astype("<i4", copy=False)
        allowed = np.unpackbits(little_endian.view(np.uint8), axis=1, bitorder="little")
        forbidden = torch.from_numpy(allowed[:, :size] == 0).to(logits.device)
        logits[row : row + count].masked_fill_(forbidden, -torch.inf)
