"""How do a step's host arrays reach the device?

In one copy a step: all arrays are packed into one pinned buffer. Where the device is plain memory
its tensors alias the host arrays, and there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes: every packed array starts at a multiple, so that any dtype can be viewed there."""


class StepStaging:
    """Brings NumPy arrays to `device`."""

    def __init__(self, device: torch.device, alias: bool | None = None) -> None:
        """`alias` False packs and copies even where memory is shared."""
        self.device = device
        self._alias = device.type == "cpu" if alias is None else alias
        self._pin = device.type == "cuda"
        self._host = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def to_device(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Tensor]:
        """A tensor for each array; on plain memory it changes with the array."""
        if self._alias:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        offsets, size = {}, 0
        for name, array in arrays.items():
            offsets[name] = size
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = self._host_buffer(size)
        flat = host.numpy()
        for name, array in arrays.items():
            start = offsets[name]
            target = flat[start : start + array.nbytes].view(array.dtype)
            np.copyto(target.reshape(array.shape), array)
        packed = torch.empty(size, dtype=torch.uint8, device=self.device)
        packed.copy_(host[:size], non_blocking=True)
        if self._pin:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return {
            name: packed[offsets[name] : offsets[name] + array.nbytes]
            .view(_TORCH_DTYPES[array.dtype.name])
            .view(array.shape)
            for name, array in arrays.items()
        }

    def _host_buffer(self, size: int) -> Tensor:
        if self._copied is not None:
            # The last copy may still be reading the buffer.
            self._copied.synchronize()
        if self._host.numel() < size:
            self._host = torch.empty(max(size, 1 << 16), dtype=torch.uint8, pin_memory=self._pin)
        return self._host


_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64}
