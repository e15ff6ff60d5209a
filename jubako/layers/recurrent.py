"""Where does a layer keep what it remembers, if that is a state and not keys and values?

A block of the KV cache is one snapshot of the layer's states. In which blocks a step finds and
leaves them depends on the mode:

* none: a request has one block, overwritten in every step.
* align: the state after a step lies in the block of the step's last token. The scheduler ends
  chunks of prompts at block borders, so that those states can be found again.
* all: as align, and a snapshot is written at every block border that a step passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kernels.cpu.recording import StateName
from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.state_slots import StateSlots
from jubako.kv_cache.specs import KVCacheSpec, MambaSpec
from jubako.layers.forward_context import get_forward_context


class RecurrentLayer(nn.Module):
    """A layer whose memory of a request is a few tensors of fixed shape.

    `layer_name` is unique in the model. `states` names each state's shape, for one request, and
    the name of its dtype. The runner binds memory with `bind_kv_cache`; from then on
    `self.states[name]` is [blocks, *shape], strided, and `step_slots` says what to read and write.
    """

    mamba_type: ClassVar[str] = "mamba2"
    """What the layer is called in its spec."""
    writes_borders: ClassVar[bool] = False
    """The layer keeps every state of `StateSlots.write_tokens`, as mode "all" needs."""

    def __init__(
        self,
        *,
        config: JubakoConfig,
        layer_name: str,
        states: Mapping[str, tuple[tuple[int, ...], str]],
    ) -> None:
        super().__init__()
        cache = config.cache_config
        self.layer_name = layer_name
        self.cache_mode = cache.mamba_cache_mode or "none"
        if self.cache_mode == "all" and not self.writes_borders:
            raise ConfigError(
                "mamba_cache_mode=all: this model's layers do not write a state at every block "
                "border; use align.",
                "mamba_cache_mode",
            )
        self.max_model_len = config.model_config.context_length
        self.state_shapes = {name: shape for name, (shape, _) in states.items()}
        self.state_dtypes = {name: dtype for name, (_, dtype) in states.items()}
        # Of no block, until there is memory: a profiling run leaves nothing.
        self.states = {
            name: torch.empty(0, *shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in states.items()
        }
        self.block_size = 0

    def get_kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What the layer keeps; without prefix caching one block lasts for the whole context."""
        real = sum(
            prod(shape) * _itemsize(self.state_dtypes[name])
            for name, shape in self.state_shapes.items()
        )
        # Every page must begin where the widest dtype may begin.
        align = max(map(_itemsize, self.state_dtypes.values()))
        padded = -(-real // align) * align
        return MambaSpec(
            block_size=self.max_model_len if self.cache_mode == "none" else block_size,
            shapes=tuple(self.state_shapes.values()),
            dtypes=tuple(self.state_dtypes.values()),
            page_size_padded=None if padded == real else padded,
            mamba_type=self.mamba_type,
            mamba_cache_mode=self.cache_mode,
        )

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int) -> None:
        """Use `raw`, [blocks, page bytes] int8, as this layer's states.

        `block_size` is the number of tokens from one block border to the next. The states of a
        block lie back to back in its page, wide dtypes first.
        """
        num_blocks, page = raw.shape
        self.block_size = block_size
        flat = raw.reshape(-1)
        start = 0
        names = sorted(self.state_shapes, key=lambda n: -_itemsize(self.state_dtypes[n]))
        for name in names:
            shape, dtype = self.state_shapes[name], getattr(torch, self.state_dtypes[name])
            strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
            self.states[name] = flat.view(dtype).as_strided(
                (num_blocks, *shape),
                (page // dtype.itemsize, *strides),
                start // dtype.itemsize + flat.storage_offset() // dtype.itemsize,
            )
            start += prod(shape) * dtype.itemsize

    def state_name(self, name: str) -> StateName:
        """What a native program calls a state."""
        return StateName(self.layer_name, name, getattr(torch, self.state_dtypes[name]))

    def step_slots(self, num_tokens: int) -> StateSlots:
        """Blocks that the running step, of `num_tokens` tokens, reads and writes.

        In a profiling run there are none, and the layer computes as for a new request.
        """
        attn_metadata = get_forward_context().attn_metadata
        if attn_metadata is None:
            return StateSlots.without_state(num_tokens)
        return self.slots_of(attn_metadata[self.layer_name])

    def slots_of(self, metadata: AttentionMetadata) -> StateSlots:
        """Blocks that a step with this metadata of the layer's group reads and writes."""
        key = ("state slots", self.cache_mode, self.block_size)
        slots: StateSlots | None = metadata.plans.get(key)
        if slots is None:
            slots = make_state_slots(metadata, self.block_size, self.cache_mode)
            metadata.plans[key] = slots
        return slots


def state_dtype(config: JubakoConfig, kind: str) -> str:
    """The dtype of a layer's "conv" (inputs of a convolution) or "ssm" (what is summed up) state.

    Inputs have the model's dtype, and sums are kept in float32, unless the options say otherwise.
    """
    cache = config.cache_config
    if kind == "conv":
        chosen = cache.mamba_cache_dtype
        return config.model_config.dtype if chosen == "auto" else chosen
    return "float32" if cache.mamba_ssm_cache_dtype == "auto" else cache.mamba_ssm_cache_dtype


def make_state_slots(metadata: AttentionMetadata, block_size: int, mode: str) -> StateSlots:
    """The blocks that a step reads and writes; `block_size` in tokens."""
    n = metadata.num_reqs
    table = metadata.block_table_cpu
    starts = metadata.query_start_loc_cpu[: n + 1].astype(np.int64)
    rows = np.arange(n)
    ends = metadata.seq_lens_cpu[:n].astype(np.int64)
    computed = ends - np.diff(starts)
    if mode == "none":
        block = table[:n, 0].astype(np.int64)
        return StateSlots(starts, np.where(computed > 0, block, -1), rows, starts[1:] - 1, block)
    last = np.maximum(computed - 1, 0) // block_size
    read = np.where(computed > 0, table[rows, last].astype(np.int64), -1)
    if mode == "align":
        requests, positions = rows, ends - 1
    else:
        # Positions of the last tokens of the blocks that the step completes, and of the step.
        first = computed // block_size
        counts = (ends - 1) // block_size - first + 1
        requests = rows.repeat(counts)
        index = np.arange(len(requests)) - (counts.cumsum() - counts).repeat(counts)
        columns = first.repeat(counts) + index
        positions = np.minimum((columns + 1) * block_size, ends[requests]) - 1
    tokens = starts[requests] + positions - computed[requests]
    blocks = table[requests, positions // block_size].astype(np.int64)
    return StateSlots(starts, read, requests, tokens, blocks)


def _itemsize(dtype: str) -> int:
    kind: Any = getattr(torch, dtype)
    size: int = kind.itemsize
    return size
