"""Which tensors make up one integer weight, and how are its numbers taken apart?

A weight NAME.weight is stored as one large tensor of integers, by format under one ending or
another, with small ones beside it. The large one is read in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from jubako.errors import CheckpointError
from jubako.models.loader.safetensors_weights import DTYPES, SafetensorsFiles, weight_dtype

INTEGERS: dict[str, torch.dtype] = {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
FOR_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)
"""Endings of tensors without use: neither activations nor the KV cache are quantised by them."""
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Endings:
    """What follows a layer's name in the names of the tensors of its weight."""

    main: str
    kind: str
    """The dtype of the main tensor, as the file spells it."""
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


class PackedWeight:
    """The stored tensors of one weight."""

    def __init__(self, tensors: SafetensorsFiles, stem: str) -> None:
        self._tensors = tensors
        self._stem = stem

    def __contains__(self, ending: str) -> bool:
        return self._stem + ending in self._tensors.entries

    def shape(self, ending: str) -> tuple[int, ...]:
        """The stored shape."""
        return self._tensors.entries[self._stem + ending].shape

    def read(self, ending: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor."""
        return self._tensors.read(self._stem + ending, dtype)

    def rows(self, ending: str, start: int, stop: int) -> torch.Tensor:
        """Some rows of a tensor of two dimensions."""
        return self._tensors.read_rows(self._stem + ending, start, stop)

    def require(self, ending: str, *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor has one of the shapes."""
        shape = self.shape(ending)
        if shape not in shapes:
            wanted = " or ".join(dict.fromkeys(str(list(wanted)) for wanted in shapes))
            raise self.fault(ending, f"shape {list(shape)}; it must have {wanted}")

    def fault(self, ending: str, has: str) -> CheckpointError:
        """The error for a tensor that has something wrong."""
        return CheckpointError(f"The checkpoint's tensor {self._stem + ending!r} has {has}.")


def packed_weights(
    files: Sequence[Path],
    endings: Endings,
    expand: Callable[[PackedWeight, torch.dtype], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the files, on `device`; those of integers by `expand`. See `load_weights`.

    Raises CheckpointError for a tensor that is missing or left over.
    """
    tensors = SafetensorsFiles(files, DTYPES | INTEGERS)
    try:
        stems = _stems(tensors, endings)
        others = (*endings.required, *endings.optional)
        parts = {stem + ending for stem in stems.values() for ending in others}
        for name, entry in tensors.entries.items():
            if name in stems:
                weight = PackedWeight(tensors, stems[name])
                own_name = f"{stems[name]}.weight"
                yield own_name, expand(weight, weight_dtype(own_name, dtype)).to(device)
            elif name not in parts and not name.endswith(FOR_ACTIVATIONS):
                if entry.kind in INTEGERS:
                    raise CheckpointError(
                        f"The checkpoint has a tensor of integers {name!r} that belongs to no "
                        f"weight of the format."
                    )
                yield name, tensors.read(name, weight_dtype(name, dtype)).to(device)
    finally:
        tensors.close()


def _stems(tensors: SafetensorsFiles, endings: Endings) -> dict[str, str]:
    """By name of each main tensor, what its name begins with; all that it needs is there."""
    stems = {
        name: name.removesuffix(endings.main)
        for name, entry in tensors.entries.items()
        if name.endswith(endings.main) and entry.kind == endings.kind
    }
    for name, entry in tensors.entries.items():
        if endings.main != ".weight" and name.endswith(endings.main) and name not in stems:
            raise CheckpointError(
                f"The checkpoint's quantised tensor {name!r} has dtype {entry.kind}; it must be "
                f"{endings.kind}."
            )
    for name, stem in stems.items():
        for ending in endings.required:
            if stem + ending not in tensors.entries:
                raise CheckpointError(
                    f"The checkpoint has the quantised tensor {name!r} but not {stem + ending!r}."
                )
    for name in tensors.entries:
        for ending in (*endings.required, *endings.optional):
            if name.endswith(ending) and name.removesuffix(ending) + endings.main not in stems:
                raise CheckpointError(
                    f"The checkpoint has {name!r}, but no quantised tensor "
                    f"{name.removesuffix(ending) + endings.main!r} that it belongs to."
                )
    return stems


def fields(words: torch.Tensor, bits: int, shifts: Sequence[int] | None = None) -> torch.Tensor:
    """Words `[..., n]` int32 to their unsigned fields `[..., n, fields]`, lowest bits first.

    `shifts` gives another order of the fields.
    """
    places = torch.tensor(shifts or range(0, 32, bits), dtype=torch.int32)
    return (words.unsqueeze(-1) >> places) & ((1 << bits) - 1)
