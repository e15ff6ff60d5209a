"""How does chunked local attention become causal attention of shorter requests?

Each request is cut where a chunk of absolute positions ends. A piece is a request of its own: its
context is its chunk so far, its blocks are the chunk's, its tokens are those of the step that lie
in the chunk. Where keys and values are written stays as it is.
"""

from __future__ import annotations

import numpy as np
import torch

from jubako.kernels.metadata import AttentionMetadata


def cut_at_chunks(
    metadata: AttentionMetadata, block_size: int, chunk_size: int
) -> AttentionMetadata:
    """The step as requests that each lie in one chunk, made once a step.

    `chunk_size` in tokens is a multiple of `block_size`.
    """
    key = ("chunks", block_size, chunk_size)
    cut: AttentionMetadata | None = metadata.plans.get(key)
    if cut is None:
        cut = metadata.plans[key] = _cut(metadata, block_size, chunk_size)
    return cut


def _cut(metadata: AttentionMetadata, block_size: int, chunk_size: int) -> AttentionMetadata:
    assert chunk_size % block_size == 0, "a chunk is a whole number of blocks"
    n = metadata.num_reqs
    seq_lens = metadata.seq_lens_cpu[:n].astype(np.int64)
    query_lens = np.diff(metadata.query_start_loc_cpu[: n + 1]).astype(np.int64)
    contexts = seq_lens - query_lens
    first_chunks = contexts // chunk_size
    pieces = np.where(query_lens > 0, (seq_lens - 1) // chunk_size - first_chunks + 1, 0)

    rows = np.repeat(np.arange(n), pieces)
    number = np.arange(len(rows)) - np.repeat(pieces.cumsum() - pieces, pieces)
    begins = (first_chunks[rows] + number) * chunk_size
    ends = np.minimum(seq_lens[rows], begins + chunk_size)
    lengths = ends - begins
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(ends - np.maximum(contexts[rows], begins), out=starts[1:])
    starts += metadata.query_start_loc_cpu[0]

    width = -(-int(lengths.max(initial=1)) // block_size)
    columns = (begins // block_size)[:, None] + np.arange(width)
    # A chunk that is not full has fewer blocks; what lies past them is not read.
    columns = np.minimum(columns, metadata.block_table_cpu.shape[1] - 1)
    table = np.ascontiguousarray(metadata.block_table_cpu[rows[:, None], columns], dtype=np.int32)
    device = metadata.slot_mapping.device
    piece_lens = lengths.astype(np.int32)
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(piece_lens).to(device),
        seq_lens_cpu=piece_lens,
        num_reqs=len(rows),
        num_actual_tokens=metadata.num_actual_tokens,
        max_query_len=int(np.diff(starts).max(initial=0)),
        max_seq_len=int(lengths.max(initial=0)),
        block_table_tensor=torch.from_numpy(table).to(device),
        block_table_cpu=table,
        slot_mapping=metadata.slot_mapping,
        slot_mapping_cpu=metadata.slot_mapping_cpu,
    )
