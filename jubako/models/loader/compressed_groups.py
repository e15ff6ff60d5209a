"""Which scale and zero point has each element of a compressed-tensors integer weight?

(https://github.com/neuralmagic/compressed-tensors) A weight [n, m] has beside it `weight_scale` [1]
for all of it, [n, 1] for each row, or [n, groups] for groups of consecutive columns, or of the
columns that `weight_g_idx` [m] names. Zero points have the shape of the scales, as int8; packed
weights have them packed over the rows. A value is (number - zero point) · scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jubako.checkpoint.quantisation import weight_schemes
from jubako.models.loader.packed_weights import Endings, PackedWeight, fields

SCALE, ZERO, GROUP = ".weight_scale", ".weight_zero_point", ".weight_g_idx"
WORD_BITS = 32


def endings(
    quantisation: Mapping[str, Any], main: str, kind: str, required: tuple[str, ...] = ()
) -> Endings:
    """The tensors of each weight, given which the main one is and what else it needs."""
    schemes = weight_schemes(quantisation)
    has_zeros = all(scheme.get("symmetric", True) is False for scheme in schemes)
    has_groups = all(scheme.get("actorder") in (True, "group") for scheme in schemes)
    needed = {SCALE: True, ZERO: has_zeros, GROUP: has_groups}
    return Endings(
        main,
        kind,
        (*required, *(ending for ending, is_needed in needed.items() if is_needed)),
        tuple(ending for ending, is_needed in needed.items() if not is_needed),
    )


def group_sizes(quantisation: Mapping[str, Any]) -> set[int]:
    """Numbers of columns that may share a scale."""
    sizes = [scheme.get("group_size") for scheme in weight_schemes(quantisation)]
    return {size for size in sizes if type(size) is int and size > 0}


@dataclass(frozen=True)
class Groups:
    """Of a weight [n, m]."""

    scales: torch.Tensor
    """[n, groups] float32."""
    zeros: torch.Tensor | None
    """[n, groups] float32."""
    of_columns: torch.Tensor
    """[m], the group of each."""

    def expand(self, numbers: torch.Tensor, start: int) -> torch.Tensor:
        """The values of rows of the weight from `start`; `numbers` is overwritten."""
        rows = slice(start, start + len(numbers))
        if self.zeros is not None:
            numbers.sub_(self.zeros[rows][:, self.of_columns])
        return numbers.mul_(self.scales[rows][:, self.of_columns])


def read_groups(
    weight: PackedWeight, n: int, m: int, sizes: set[int], bits: int | None = None
) -> Groups:
    """The groups of a weight; `bits` of packed zero points. CheckpointError if they do not fit."""
    sizes_in_use = {-(-m // size): size for size in sizes}
    one = ((), (1,), (1, 1))
    weight.require(SCALE, *one, (n, 1), (n,), *((n, count) for count in sizes_in_use))
    stored = weight.shape(SCALE)
    count = stored[1] if len(stored) == 2 else 1
    of_columns = torch.arange(m) // (max(m, 1) if count == 1 else sizes_in_use[count])
    if GROUP in weight:
        of_columns = _named_groups(weight, m, count, of_columns)
    scales = weight.read(SCALE, torch.float32).reshape(-1, count).expand(n, count)
    return Groups(scales, _zeros(weight, n, count, bits), of_columns)


def _named_groups(weight: PackedWeight, m: int, count: int, in_order: torch.Tensor) -> torch.Tensor:
    weight.require(GROUP, (m,))
    named = weight.read(GROUP).long()
    if bool((named == -1).all()):  # never set
        return in_order
    if not 0 <= int(named.min()) <= int(named.max()) < count:
        raise weight.fault(
            GROUP, f"groups {int(named.min())} to {int(named.max())}, but there are {count}"
        )
    return named


def _zeros(weight: PackedWeight, n: int, count: int, bits: int | None) -> torch.Tensor | None:
    if ZERO not in weight:
        return None
    stored = weight.read(ZERO)
    if bits is not None and stored.dtype == torch.int32:
        words = -(-n * bits // WORD_BITS)
        weight.require(ZERO, (words, count))
        numbers = fields(stored, bits).mT.reshape(-1, count)[:n]
        return numbers.float().sub_(1 << (bits - 1))
    shape = weight.shape(SCALE)
    weight.require(ZERO, shape, (shape[0] if shape else 1, count))
    return stored.to(torch.float32).reshape(-1, count).expand(n, count)
