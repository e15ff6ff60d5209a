"""How are MXFP4 weights expanded?

(Open Compute Project 2023, Microscaling Formats 1.0.) A weight [experts, rows, m] comes as
`NAME_blocks` [experts, rows, m / 32, 16], each byte two 4-bit floats, the lower half first, and
`NAME_scales` [experts, rows, m / 32], each byte the exponent of a power of two that its block of 32
is multiplied by. Expanded it is what an unquantised checkpoint holds as NAME, [experts, m, rows].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from jubako.errors import CheckpointError
from jubako.models.loader.safetensors_weights import DTYPES, SafetensorsFiles, weight_dtype

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_SIZE = 32
CHUNK_BLOCKS = 1 << 15
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""


def mxfp4_weights(
    files: Sequence[Path], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the files, expanded to `dtype` on `device`. See `load_weights`.

    Raises CheckpointError for blocks without scales, scales without blocks, and shapes that do not
    fit each other.
    """
    tensors = SafetensorsFiles(files, DTYPES | {"U8": torch.uint8})
    try:
        _check(tensors)
        for name, entry in tensors.entries.items():
            if entry.kind != "U8":
                yield name, tensors.read(name, weight_dtype(name, dtype)).to(device)
            elif name.endswith(BLOCKS):
                stem = name.removesuffix(BLOCKS)
                yield stem, _expanded(tensors, stem, dtype).mT.to(device)
    finally:
        tensors.close()


def _check(tensors: SafetensorsFiles) -> None:
    packed = {name: entry for name, entry in tensors.entries.items() if entry.kind == "U8"}
    for name, entry in packed.items():
        if not name.endswith((BLOCKS, SCALES)):
            raise CheckpointError(
                f"The checkpoint has an integer tensor {name!r}; only tensors whose names end in "
                f"{BLOCKS} or {SCALES} hold MXFP4 weights."
            )
        stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
        other = stem + (SCALES if name.endswith(BLOCKS) else BLOCKS)
        if other not in packed:
            raise CheckpointError(f"The checkpoint has the tensor {name!r} but not {other!r}.")
        if name.endswith(BLOCKS):
            shape, scales = entry.shape, packed[other].shape
            if len(shape) != 4 or shape[-1] != BLOCK_SIZE // 2 or shape[:-1] != scales:
                raise CheckpointError(
                    f"The MXFP4 tensor {name!r} has shape {list(shape)} and its scales "
                    f"{list(scales)}; they must be [experts, rows, n, {BLOCK_SIZE // 2}] and "
                    "[experts, rows, n]."
                )


def _expanded(tensors: SafetensorsFiles, stem: str, dtype: torch.dtype) -> torch.Tensor:
    """The weight [experts, rows, m]."""
    experts, rows, groups, _ = tensors.entries[stem + BLOCKS].shape
    out = torch.empty(experts, rows, groups * BLOCK_SIZE, dtype=dtype)
    by_block = out.view(-1, BLOCK_SIZE)
    scales = tensors.read(stem + SCALES).view(torch.float8_e8m0fnu).flatten()
    pairs = _pairs()
    for start in range(0, len(by_block), CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, len(by_block))
        packed = tensors.read_rows(stem + BLOCKS, start, stop)
        values = pairs[packed.long()].flatten(1)
        by_block[start:stop] = values.mul_(scales[start:stop].to(torch.float32)[:, None])
    return out


def _pairs() -> torch.Tensor:
    """The two values of each byte, [256, 2] float32."""
    half = torch.tensor((*VALUES, *(-value for value in VALUES)))
    byte = torch.arange(256)
    return torch.stack((half[byte & 15], half[byte >> 4]), dim=1)
