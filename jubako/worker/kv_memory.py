"""Where does the KV cache lie in memory?"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from jubako.kv_cache.config import KVCacheConfig, KVCacheGroupSpec
from jubako.kv_cache.specs import KVCacheSpec
from jubako.worker.block_table import MultiGroupBlockTable


class KVLayer(Protocol):
    """A layer that keeps KV."""

    def get_kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What the layer keeps in blocks of `block_size` tokens."""

    def bind_kv_cache(self, raw: Tensor, block_size: int) -> None:
        """Take `raw` [num_blocks, page_size_bytes] int8 as this layer's KV."""


@runtime_checkable
class SinkLayer(Protocol):
    """A layer that may have sink tokens: keys and values that every request sees first."""

    def write_sinks(self, block_ids: Tensor) -> None:
        """Write them into these blocks of the kernel's, [b] int64."""


def write_sinks(
    groups: Sequence[KVCacheGroupSpec], layers: Mapping[str, KVLayer], table: MultiGroupBlockTable
) -> None:
    """Fill the blocks that `table` puts before every row with the sink tokens of the layers."""
    for group, group_table in zip(groups, table, strict=True):
        if not group_table.num_sink_tokens:
            continue
        block_ids = torch.from_numpy(group_table.sink_blocks.astype("int64"))
        for name in group.layer_names:
            layer = layers[name]
            assert isinstance(layer, SinkLayer), f"{name} has sink blocks but no sink tokens"
            layer.write_sinks(block_ids)


def allocate_zeroed(num_bytes: int, device: torch.device) -> Tensor:
    """A zeroed int8 buffer. In plain memory a page costs nothing until it is written."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.int8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # The tensor keeps the mapping alive.
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.int8)


def bind_kv_tensors(
    config: KVCacheConfig,
    layers: Mapping[str, KVLayer],
    kernel_block_sizes: Mapping[str, tuple[int, int]],
    device: torch.device,
) -> list[Tensor]:
    """Allocate every tensor of `config` and bind it to the layers that share it.

    `kernel_block_sizes` gives, by layer name, the tokens a block has for the KV manager and for the
    layer's kernel; where the latter is smaller, the layer sees as many more blocks. Returns the
    buffers.
    """
    buffers = []
    for tensor in config.kv_cache_tensors:
        buffer = allocate_zeroed(tensor.size, device)
        buffers.append(buffer)
        for name in tensor.shared_by:
            block_size, kernel_block_size = kernel_block_sizes[name]
            num_blocks = config.num_blocks * (block_size // kernel_block_size)
            layers[name].bind_kv_cache(buffer.view(num_blocks, -1), kernel_block_size)
    return buffers
