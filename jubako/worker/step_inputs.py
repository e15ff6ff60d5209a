"""What does a forward pass need to know about a step: tokens, positions, addresses, logits rows?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jubako.kernels.metadata import AttentionMetadata
from jubako.worker.block_table import BlockTable
from jubako.worker.input_batch import InputBatch
from jubako.worker.staging import StepStaging

NO_ROWS: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(0, np.int64)


@dataclass
class StepInputs:
    """Inputs of one forward pass over `T` tokens of `n` requests."""

    input_ids: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int64."""
    attention: dict[str, AttentionMetadata]
    """By layer name; layers of a KV group share one object."""
    logits_indices: Tensor
    """[r] int64: tokens whose logits are sampled from."""
    logits_rows: np.ndarray[Any, np.dtype[np.int64]]
    """[r]: their batch rows, ascending. Rows inside their prompt are not among them."""
    query_start_loc: np.ndarray[Any, np.dtype[np.int32]]
    """[n + 1]: first token of each row."""


class StepInputBuilder:
    """Makes `StepInputs` in buffers that live as long as the engine."""

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        layer_groups: Sequence[Sequence[str]],
        staging: StepStaging,
        encoder_only_layers: Sequence[str] = (),
    ) -> None:
        """`layer_groups` are the layer names of each KV group, `encoder_only_layers` the layers
        that keep no KV: a group without blocks."""
        self._layer_groups = layer_groups
        self._encoder_only_layers = encoder_only_layers
        self._staging = staging
        self.input_ids: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(max_num_tokens, np.int32)
        self.positions: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(max_num_tokens, np.int64)
        self.query_start_loc: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(
            max_num_reqs + 1, np.int32
        )
        self.seq_lens: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(max_num_reqs, np.int32)
        self._arange = np.arange(max(max_num_tokens, max_num_reqs), dtype=np.int64)

    def build(
        self,
        batch: InputBatch,
        num_scheduled_tokens: Mapping[str, int],
        encoded_rows: np.ndarray[Any, Any] = NO_ROWS,
    ) -> StepInputs:
        """The step that computes `num_scheduled_tokens` tokens of each row of `batch`.

        Encoder outputs of `encoded_rows` [e], ascending, are new in it.
        """
        n = batch.num_reqs
        scheduled = np.fromiter(
            (num_scheduled_tokens[r] for r in batch.req_ids), dtype=np.int64, count=n
        )
        computed = batch.num_computed_tokens_cpu[:n].astype(np.int64)
        total = self._fill(batch, scheduled, computed)
        # A row is sampled once its context holds all tokens that are known.
        seq_lens = self.seq_lens[:n]
        logits_rows = (seq_lens >= batch.num_tokens_no_spec[:n]).nonzero()[0]
        tables = list(batch.block_table)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "positions": self.positions[:total],
            "logits_indices": self.query_start_loc[logits_rows + 1].astype(np.int64) - 1,
            "input_ids": self.input_ids[:total],
            "query_start_loc": self.query_start_loc[: n + 1],
            "seq_lens": seq_lens,
        }
        for group, table in enumerate(tables):
            widest = int(table.num_blocks_per_row[:n].max(initial=0))
            arrays[f"blocks{group}"] = table.table[:n, :widest]
            if group in batch.block_table.encoder_groups:
                lengths = batch.num_encoder_tokens[:n]
                arrays[f"slots{group}"] = _encoder_slots(table, encoded_rows, lengths)
                arrays[f"seq_lens{group}"] = lengths
                continue
            arrays[f"slots{group}"] = table.slot_mapping[:total]
            if table.num_sink_tokens:
                # Sinks stand before position 0; an empty context stays empty.
                arrays[f"seq_lens{group}"] = seq_lens + (seq_lens > 0) * np.int32(
                    table.num_sink_tokens
                )
        tensors = self._staging.to_device(arrays)

        attention: dict[str, AttentionMetadata] = {}
        max_query_len, max_seq_len = int(scheduled.max()), int(seq_lens.max())
        for group, names in enumerate(self._layer_groups):
            lens = f"seq_lens{group}" if f"seq_lens{group}" in arrays else "seq_lens"
            metadata = AttentionMetadata(
                query_start_loc=tensors["query_start_loc"],
                query_start_loc_cpu=arrays["query_start_loc"],
                seq_lens=tensors[lens],
                seq_lens_cpu=arrays[lens],
                num_reqs=n,
                num_actual_tokens=total,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len if lens == "seq_lens" else int(arrays[lens].max()),
                block_table_tensor=tensors[f"blocks{group}"],
                block_table_cpu=arrays[f"blocks{group}"],
                slot_mapping=tensors[f"slots{group}"],
                causal=group not in batch.block_table.encoder_groups,
                slot_mapping_cpu=arrays[f"slots{group}"],
            )
            attention.update(dict.fromkeys(names, metadata))
        if self._encoder_only_layers:
            # Their requests are never split: what is scheduled is all there is.
            metadata = AttentionMetadata.both_ways(
                arrays["query_start_loc"], tensors["query_start_loc"], tensors["seq_lens"]
            )
            attention.update(dict.fromkeys(self._encoder_only_layers, metadata))
        return StepInputs(
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            attention=attention,
            logits_indices=tensors["logits_indices"],
            logits_rows=logits_rows,
            query_start_loc=arrays["query_start_loc"],
        )

    def _fill(
        self, batch: InputBatch, scheduled: np.ndarray[Any, Any], computed: np.ndarray[Any, Any]
    ) -> int:
        """Fill the buffers; returns T."""
        n = len(scheduled)
        ends = scheduled.cumsum()
        total = int(ends[-1])
        self.query_start_loc[1 : n + 1] = ends
        # Kernels may look at padded rows: offsets never decrease, contexts are empty.
        self.query_start_loc[n + 1 :] = total
        self.seq_lens[:n] = computed + scheduled
        self.seq_lens[n:] = 0
        req_indices = self._arange[:n].repeat(scheduled)
        positions = self.positions[:total]
        np.subtract(self._arange[:total], (ends - scheduled - computed)[req_indices], out=positions)
        width = batch.token_ids_cpu.shape[1]
        batch.token_ids_cpu.reshape(-1).take(
            positions + req_indices * width, out=self.input_ids[:total], mode="clip"
        )
        batch.block_table.compute_slot_mapping(req_indices, positions)
        return total


def _encoder_slots(
    table: BlockTable, rows: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Slots [E] of the encoder outputs of `rows`, one row's behind the other's."""
    counts = lengths[rows].astype(np.int64)
    ends = counts.cumsum()
    positions = np.arange(int(counts.sum())) - (ends - counts).repeat(counts)
    return table.compute_slot_mapping(rows.repeat(counts), positions)


def dummy_inputs(
    num_tokens: int, device: torch.device, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """Token ids and positions of a step that only warms up or measures."""
    ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    return ids, torch.arange(num_tokens, dtype=torch.int64, device=device) % max_model_len
