"""What do layers need to describe themselves to a program?

A layer that can has, beside `forward`, a method `record` that appends to a `Program` what `forward`
would compute. The program is `program.NativeProgram`; layers know only what is here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch

F32 = 0
BF16 = 1
RMS_NORM = 0
LAYER_NORM = 1


class RecordingError(Exception):
    """A layer, or a way to use it, has no native form in a program."""


class Rows(NamedTuple):
    """A buffer with a row for each token of the step."""

    address: int
    dtype: int
    width: int
    stride: int
    """In elements."""


class NativeRotation(NamedTuple):
    """Cosines and sines of the step's positions, float32."""

    cos: int
    sin: int
    stride: int
    size: int
    """Elements of a head that turn."""


class NormWeights(NamedTuple):
    """What a norm multiplies by and adds, float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    kind: int


class AttentionShape(NamedTuple):
    """What an attention layer computes; fields as those of `layers.attention.Attention`."""

    layer_name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    attention_chunk_size: int | None
    sinks: torch.Tensor | None


class Program(Protocol):
    """The ops that a model becomes.

    Between layers stands one float32 residual stream [T, hidden], to which layers add.
    """

    @property
    def dtype(self) -> int:
        """What enters matrix products."""
        ...

    def embed(self, table: Any, scale: float) -> None:
        """Begin the stream with `scale` times the vectors of the step's token ids."""
        ...

    def rotation(self, frequencies: torch.Tensor, factor: float) -> NativeRotation:
        """`factor` times cosines and sines of angles per position [R / 2] float32."""
        ...

    def normed(self, norm: NormWeights) -> Rows:
        """The stream, normalised, in the model's dtype; until the next call."""
        ...

    def raw(self) -> Rows:
        """The stream in the model's dtype; until the next call of this or `normed`."""
        ...

    def normalise(self, x: Rows, start: int, norm: NormWeights) -> None:
        """Normalise the columns of `x` from `start` on, as many as the norm has, where they are."""
        ...

    def add(self, delta: Rows, norm: NormWeights | None = None, scale: float = 1.0) -> None:
        """Add `scale · norm(delta)` to the stream."""
        ...

    def linear(
        self,
        x: Rows,
        matrix: Any,
        bias: torch.Tensor | None,
        role: str,
        *,
        dtype: int = F32,
        activation: str | None = None,
        to_stream: bool = False,
    ) -> Rows:
        """`x @ matrix.T + bias`, in the buffer for `role`, which layers use after each other.

        With an activation ("silu", "gelu", "gelu_tanh") the matrix is gate and up interleaved, and
        the result is `act(gate) · up`. With `to_stream` the result is added to the stream.
        """
        ...

    def attention(
        self,
        qkv: Rows,
        shape: AttentionShape,
        rotation: NativeRotation | None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        interleaved: bool = False,
    ) -> Rows:
        """Query, key and value heads → what the query heads attend to, in the model's dtype.

        Query and key heads are normalised by `norm` [Hq + Hkv, D] if it is given, then rotated.
        """
        ...

    def final_norm(self, norm: NormWeights) -> Rows:
        """The result: hidden states of the rows that are wanted."""
        ...

    def greedy_head(self, hidden: Rows, matrix: Any) -> None:
        """Choose the best token of each row of the result, where no logits are needed."""
        ...


def record(module: Any, program: Program, *args: Any, **kwargs: Any) -> Any:
    """Let a layer record itself; RecordingError if it cannot.

    A subclass that changes `forward` and not `record` cannot either.
    """
    for cls in type(module).__mro__:
        if "record" in vars(cls):
            return module.record(program, *args, **kwargs)
        if "forward" in vars(cls):
            break
    raise RecordingError(type(module).__name__)


_T = TypeVar("_T")


def require_kind(module: Any, kind: type[_T]) -> _T:
    """`module`, if it is of this very class; RecordingError if it may compute something else."""
    if type(module) is not kind:
        raise RecordingError(type(module).__name__)
    return module
