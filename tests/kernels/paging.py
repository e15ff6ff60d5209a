"""How do the tests lay requests out in pages?"""

from __future__ import annotations

import numpy as np
import torch

from jubako.kernels.metadata import AttentionMetadata


def make_metadata(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]], block_size: int
) -> AttentionMetadata:
    """A step in which each request computes the last `query_len` of its `seq_len` tokens."""
    n = len(query_lens)
    # Past the last block stands a block number that does not exist.
    table = np.full((n, max(map(len, tables)) + 1), 1_000_000, np.int32)
    slots: list[int] = []
    for i, blocks in enumerate(tables):
        table[i, : len(blocks)] = blocks
        for p in range(seq_lens[i] - query_lens[i], seq_lens[i]):
            slots.append(blocks[p // block_size] * block_size + p % block_size)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.asarray(seq_lens, np.int32)
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(lens),
        seq_lens_cpu=lens,
        num_reqs=n,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.from_numpy(table),
        block_table_cpu=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )


def scrambled_tables(
    seq_lens: list[int], block_size: int, rng: np.random.Generator
) -> tuple[list[list[int]], int]:
    """Block tables in random order, and how many blocks there are; some belong to nobody."""
    counts = [-(-s // block_size) for s in seq_lens]
    num_blocks = sum(counts) + 3
    order = rng.permutation(num_blocks).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return tables, num_blocks
