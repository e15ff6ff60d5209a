"""How are 8-bit floating-point weights expanded?

A weight [..., n, m] of type float8 has beside it the factors that give back its values: one for
each block of n and m (`weight_scale_inv`, DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.1), one
for each row, or one for all (`weight_scale`). Its values are multiplied in float32. Factors for
activations are not used, as activations are not quantised here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models.loader.packed_weights import FOR_ACTIVATIONS
from jubako.models.loader.safetensors_weights import (
    DTYPES,
    SafetensorsFiles,
    weight_dtype,
)

FP8_DTYPES: dict[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SCALE_DTYPES: dict[str, torch.dtype] = {"F8_E8M0": torch.float8_e8m0fnu}
"""Powers of two."""
SCALES = ("_scale_inv", "_scale")
"""What follows a weight's name in the names of its factors, best first."""
CHUNK_ELEMENTS = 1 << 20


def fp8_weights(
    files: Sequence[Path],
    quantisation: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the files, expanded to `dtype` on `device`. See `load_weights`.

    `quantisation` is the checkpoint's `quantization_config`. Raises CheckpointError for factors
    that are missing, left over or do not fit their weight.
    """
    block = _block_size(quantisation)
    tensors = SafetensorsFiles(files, DTYPES | FP8_DTYPES | SCALE_DTYPES)
    try:
        scale_names = _scale_names(tensors)
        # Factors are small, and may be in another file than their weight.
        scales = {
            name: tensors.read(scale).to(torch.float32) for name, scale in scale_names.items()
        }
        not_weights = set(scale_names.values())
        for name, entry in tensors.entries.items():
            if name in not_weights or name.endswith(FOR_ACTIVATIONS):
                continue
            wanted = weight_dtype(name, dtype)
            if entry.kind in FP8_DTYPES:
                factors = _factors(name, entry.shape, scales[name], block)
                yield name, _expanded(tensors, name, factors, wanted).to(device)
            else:
                yield name, tensors.read(name, wanted).to(device)
    finally:
        tensors.close()


def _block_size(quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a factor; None where a row or the whole weight does."""
    block = quantisation.get("weight_block_size")
    if block is None:
        return None
    numbers = isinstance(block, list) and all(type(size) is int and size > 0 for size in block)
    if not numbers or len(block) != 2:
        raise UnsupportedModelError(
            f"weight_block_size in config.json must be two numbers above 0, got {block!r}."
        )
    return block[0], block[1]


def _scale_names(tensors: SafetensorsFiles) -> dict[str, str]:
    """By name of each 8-bit weight, the name of its factors."""
    found = {}
    for name, entry in tensors.entries.items():
        if entry.kind not in FP8_DTYPES:
            continue
        names = [name + ending for ending in SCALES]
        own = [scale for scale in names if scale in tensors.entries]
        if not own:
            raise CheckpointError(
                f"The checkpoint has the 8-bit tensor {name!r} but not its factors {names[0]!r}."
            )
        found[name] = own[0]
    used = set(found.values())
    for name in tensors.entries:
        if name.endswith(SCALES) and name not in used and not name.endswith(FOR_ACTIVATIONS):
            raise CheckpointError(
                f"The checkpoint has factors {name!r}, but no 8-bit tensor that they belong to."
            )
    return found


@dataclass(frozen=True)
class _Factors:
    """Of a weight seen as [matrices, n, m]."""

    scales: torch.Tensor
    """[matrices, blocks of n, blocks of m] float32."""
    block: tuple[int, int]
    matrix_rows: int
    """n"""

    def of_rows(self, start: int, stop: int, size: int) -> torch.Tensor:
        """The factors of rows of the weight seen as [matrices · n, m = size]."""
        rows = torch.arange(start, stop)
        matrix, row = rows // self.matrix_rows, rows % self.matrix_rows
        by_row = self.scales[matrix, row // self.block[0]]
        return by_row.repeat_interleave(self.block[1], dim=1)[:, :size]


def _factors(
    name: str, shape: tuple[int, ...], scales: torch.Tensor, block: tuple[int, int] | None
) -> _Factors:
    if len(shape) < 2:
        raise CheckpointError(f"The 8-bit tensor {name!r} has shape {list(shape)}; it needs rows.")
    *leading, n, m = shape
    if block is None:
        block = (1, m) if scales.numel() == math.prod(shape[:-1]) else (n, m)
    wanted = [*leading, -(-n // block[0]), -(-m // block[1])]
    # One factor for each row or for all may lack the last dimensions.
    if list(scales.shape) != wanted and (block[1] != m or scales.numel() != math.prod(wanted)):
        raise CheckpointError(
            f"The factors of the 8-bit tensor {name!r} have shape {list(scales.shape)}; "
            f"they must have {wanted}."
        )
    return _Factors(scales.reshape(-1, *wanted[-2:]), block, n)


def _expanded(
    tensors: SafetensorsFiles, name: str, factors: _Factors, dtype: torch.dtype
) -> torch.Tensor:
    shape = tensors.entries[name].shape
    out = torch.empty(shape, dtype=dtype)
    if not out.numel():
        return out
    rows = out.view(-1, shape[-1])
    step = max(1, CHUNK_ELEMENTS // shape[-1])
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        values = tensors.read_rows(name, start, stop).to(torch.float32)
        rows[start:stop] = values.mul_(factors.of_rows(start, stop, shape[-1]))
    return out
