"""How do queries and keys learn their positions?

Rotary embedding (Su et al. 2021) with the scalings that checkpoints name in `rope_type`. Angles,
cosines and sines are float32 and made once a step for all layers of one base.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from jubako.errors import UnsupportedModelError
from jubako.kernels.cpu.recording import AttentionShape, NativeRotation, Program, Rows
from jubako.kernels.registry import get_kernels
from jubako.layers.weights import WeightTarget, parameter


class Rotation(NamedTuple):
    """Cosines and signed sines [T, 1, R] of a step's tokens, for `Kernels.qk_norm_rope`.

    R is what turns of a head, all or the first elements of it.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class RopeParameters:
    """The base and its scaling, with the checkpoint's names."""

    theta: float
    rope_type: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)
    """Further entries of the checkpoint's `rope_parameters` or `rope_scaling`."""
    max_position_embeddings: int = 0
    """Positions that the model was made for."""

    @property
    def original_length(self) -> float:
        """Positions that it was trained for before its rotation was scaled."""
        if self.scaling.get("original_max_position_embeddings") is None:
            return self.max_position_embeddings
        return _entry(self, "original_max_position_embeddings")


class RotaryEmbedding(nn.Module):
    """Angles for heads of `head_size`; `max_model_len` is the longest context that will occur."""

    def __init__(self, head_size: int, rope: RopeParameters, max_model_len: int) -> None:
        super().__init__()
        frequencies, self.attention_factor = _frequencies(head_size, rope, max_model_len)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: torch.Tensor

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Positions [T] → the step's rotation."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos.mul_(self.attention_factor), sin.mul_(self.attention_factor)
        return Rotation(
            torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
        )

    def record(self, program: Program) -> NativeRotation:
        """As `forward` of the step's positions, in a program."""
        return program.rotation(self.frequencies, self.attention_factor)


class QKRope(nn.Module):
    """Rotate query and key heads, without a norm.

    `interleaved`: neighbours turn together, not elements half a head apart.
    """

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.kernels = get_kernels()

    def forward(self, qk: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """qk [T, H, D], heads of any kind → the same shape."""
        return self.kernels.qk_norm_rope(
            qk, rotation.cos, rotation.sin, interleaved=self.interleaved
        )

    def record(
        self, program: Program, qkv: Rows, shape: AttentionShape, rotation: NativeRotation
    ) -> Rows:
        """As `forward` and the attention to its results, in a program."""
        return program.attention(qkv, shape, rotation, interleaved=self.interleaved)


class QKNormRope(nn.Module):
    """Normalise query and key heads, each kind with its own weight [D], then rotate them.

    `weight_offset` as for `RMSNorm`. The weights are held once per head, so that all heads are
    normalised in one go.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        eps: float,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.eps = eps
        self.weight_offset = weight_offset
        self.weight = parameter(num_heads + num_kv_heads, head_size, dtype=torch.float32)
        self.kernels = get_kernels()

    def forward(self, qk: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """qk [T, Hq + Hkv, D] → the same shape."""
        return self.kernels.qk_norm_rope(qk, rotation.cos, rotation.sin, self.weight, self.eps)

    def record(
        self, program: Program, qkv: Rows, shape: AttentionShape, rotation: NativeRotation
    ) -> Rows:
        """As `forward` and the attention to its results, in a program."""
        return program.attention(qkv, shape, rotation, self.weight, self.eps)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`q_norm.weight` and `k_norm.weight`, [D] each."""
        del name
        shape = (self.weight.shape[1],)
        for part, heads in (
            ("q_norm", slice(0, self.num_heads)),
            ("k_norm", slice(self.num_heads, None)),
        ):
            view = self.weight.data[heads]
            yield f"{part}.weight", WeightTarget(view, shape, self.weight_offset)


def _frequencies(
    head_size: int, rope: RopeParameters, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Angle per position [R/2] float32, and the factor on cosines and sines.

    R is what `partial_rotary_factor` leaves of a head.
    """
    head_size = _rotated_size(head_size, rope)
    match rope.rope_type:
        case "default":
            return _default(head_size, rope.theta), 1.0
        case "linear":
            return _default(head_size, rope.theta) / _entry(rope, "factor"), 1.0
        case "dynamic":
            return _dynamic(head_size, rope, max_model_len), 1.0
        case "llama3":
            return _llama3(head_size, rope), 1.0
        case "yarn":
            return _yarn(head_size, rope)
        case "longrope":
            return _longrope(head_size, rope, max_model_len)
        case _:
            raise UnsupportedModelError(
                f"The model's rope_type {rope.rope_type!r} is not supported; "
                "known are default, linear, dynamic, llama3, yarn, longrope."
            )


def _rotated_size(head_size: int, rope: RopeParameters) -> int:
    """How many elements of a head turn."""
    partial = rope.scaling.get("partial_rotary_factor")
    if partial is None:
        return head_size
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise UnsupportedModelError(
            f"partial_rotary_factor must be a number above 0 and at most 1, got {partial!r}."
        )
    size = int(head_size * partial)
    if size < 2 or size % 2:
        raise UnsupportedModelError(
            f"A partial_rotary_factor of {partial:g} turns {size} elements of a head of "
            f"{head_size}; it must be an even number of at least 2."
        )
    return size


def _entry(rope: RopeParameters, name: str) -> float:
    value = rope.scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(
            f"rope_type {rope.rope_type!r} needs a number above 0 for {name!r}, not {value!r}."
        )
    return float(value)


def _default(head_size: int, theta: float) -> torch.Tensor:
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / theta**exponents


def _dynamic(head_size: int, rope: RopeParameters, max_model_len: int) -> torch.Tensor:
    """NTK-aware scaling of the base for contexts beyond the trained length.

    The base is fixed by the longest context that the engine allows. Making it follow the sequence
    at hand, as the scheme was first described, would turn cached keys wrong as a context grows.
    """
    factor = _entry(rope, "factor")
    trained = rope.max_position_embeddings
    stretch = factor * max(max_model_len, trained) / trained - (factor - 1)
    return _default(head_size, rope.theta * stretch ** (head_size / (head_size - 2)))


def _llama3(head_size: int, rope: RopeParameters) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    plain = _default(head_size, rope.theta)
    low, high = _entry(rope, "low_freq_factor"), _entry(rope, "high_freq_factor")
    turns = rope.original_length * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / _entry(rope, "factor")


def _yarn(head_size: int, rope: RopeParameters) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3), with DeepSeek's `mscale` entries."""
    scaling = rope.scaling
    original = rope.original_length
    if scaling.get("factor") is None:
        factor = rope.max_position_embeddings / original
    else:
        factor = _entry(rope, "factor")

    def dimension(turns: float) -> float:
        """The dimension that turns this often over the original length."""
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    ramp = (torch.arange(head_size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    plain = _default(head_size, rope.theta)
    frequencies = stretched * plain / factor + (1 - stretched) * plain

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = temperature(1.0)
        if mscale and all_dims:
            attention_factor = temperature(mscale) / temperature(all_dims)
    return frequencies, float(attention_factor)


def _longrope(
    head_size: int, rope: RopeParameters, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each frequency has a divisor of its own.

    There are two sets, for contexts within the trained length and for longer ones. Which is used
    is fixed by the longest context that the engine allows: a sequence that changed from one set to
    the other as it grew would have to compute all its keys again, and could share none with others.
    """
    original = rope.original_length
    divisors = _divisors(
        rope, "long_factor" if max_model_len > original else "short_factor", head_size
    )
    factor = rope.max_position_embeddings / original
    if rope.scaling.get("factor") is not None:
        factor = _entry(rope, "factor")
    attention_factor = 1.0
    if rope.scaling.get("attention_factor") is not None:
        attention_factor = _entry(rope, "attention_factor")
    elif factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return _default(head_size, rope.theta) / divisors, attention_factor


def _divisors(rope: RopeParameters, name: str, head_size: int) -> torch.Tensor:
    entry = rope.scaling.get(name)
    if (
        not isinstance(entry, list)
        or len(entry) != head_size // 2
        or not all(type(x) in (int, float) and 0 < x < math.inf for x in entry)
    ):
        raise UnsupportedModelError(
            f"rope_type {rope.rope_type!r} needs {head_size // 2} numbers above 0 for {name!r}."
        )
    return torch.tensor(entry, dtype=torch.float32)
