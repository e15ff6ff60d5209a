"""What do layers need to describe themselves to a program?

A layer that can has, beside `forward`, a method `record` that appends to a `Program` what `forward`
would compute. The program is `program.NativeProgram`; layers know only what is here.
"""

from __future__ import annotations

import math
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

    def columns(self, start: int, width: int) -> Rows:
        """`width` elements of each row, from `start` on."""
        size = 4 if self.dtype == F32 else 2
        return Rows(self.address + start * size, self.dtype, width, self.stride)


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


class GatedNormWeights(NamedTuple):
    """A root mean square norm of groups of neighbours, before or after a gate."""

    weight: torch.Tensor
    """[size] float32, or as many as a part of it that repeats."""
    group_size: int
    eps: float
    norm_first: bool


class StateName(NamedTuple):
    """A state of a recurrent layer."""

    layer_name: str
    name: str
    dtype: torch.dtype


EXPERT_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")
"""What can lie between the matrices of experts without a gate."""


class ExpertChoice(NamedTuple):
    """How a token's experts and their weights come from the logits of a router."""

    k: int
    """Experts of a token."""
    score: str
    """"softmax" or "sigmoid" of the logits, or "softmax of chosen" or "sigmoid of chosen": the k
    largest logits, and what becomes of them alone."""
    normalise: bool = False
    """Weights of a token sum to 1, before the factor."""
    factor: float = 1.0
    bias: torch.Tensor | None = None
    """[E] float32, added to scores for the choice, not for the weights."""
    groups: int = 1
    """Of neighbouring experts; experts come from the `chosen_groups` best."""
    chosen_groups: int = 1
    group_best: int = 1
    """A group counts as much as so many of its best together."""


class ExpertRules(NamedTuple):
    """What experts compute besides their matrices; as the arguments of `Kernels.fused_experts`."""

    activation: str = "silu"
    up_bias: torch.Tensor | None = None
    """[E, rows of up] float32."""
    down_bias: torch.Tensor | None = None
    """[E, hidden] float32."""
    limit: float | None = None
    alpha: float = 1.702
    weigh_input: bool = False


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
        query_scale: Rows | None = None,
    ) -> Rows:
        """Query, key and value heads → what the query heads attend to, in the model's dtype.

        Query and key heads are normalised by `norm` [Hq + Hkv, D] if it is given, then rotated;
        then queries are multiplied by `query_scale`, one float32 a token.
        """
        ...

    def experts(
        self,
        x: Rows,
        logits: Rows,
        routing: ExpertChoice,
        matrices: tuple[Any, Any],
        rules: ExpertRules,
        role: str,
        *,
        to_stream: bool = False,
    ) -> Rows:
        """The weighted sum of the answers of the experts that float32 `logits` [T, E] choose.

        `matrices` are what `Kernels.pack_experts` returned, `role` and `to_stream` as for `linear`.
        """
        ...

    def pointwise(
        self,
        x: Rows,
        function: str,
        role: str | None,
        *,
        bias: torch.Tensor | None = None,
        factor: torch.Tensor | float | None = None,
        limits: tuple[float, float] = (-math.inf, math.inf),
        dtype: int = F32,
    ) -> Rows:
        """`function(x + bias)`, kept within `limits`, times `factor`; without a `role` in place.

        Functions are "identity", "silu", "gelu", "gelu_tanh", "relu", "relu2" (the square of what
        is above 0), "tanh", "sigmoid" and "softplus".
        """
        ...

    def gate(
        self, x: Rows, gate: Rows, function: str, role: str | None, *, to_stream: bool = False
    ) -> Rows:
        """`x · function(gate)` in the model's dtype, in place without a `role`, or added to the
        stream. A gate one wide belongs to the whole row."""
        ...

    def gated_mul(self, x: Rows, activation: str, role: str) -> Rows:
        """`act(gate) · up` of the two halves of x, in the model's dtype."""
        ...

    def gated_norm(self, x: Rows, gate: Rows, norm: GatedNormWeights, role: str) -> Rows:
        """`norm(x · silu(gate))`, or `norm(x) · silu(gate)`, in the model's dtype."""
        ...

    def position_scale(self, scale: float, offset: float, every: float) -> Rows:
        """Of each token `1 + scale · log(1 + floor((position + offset) / every))`, one wide."""
        ...

    def causal_conv(
        self,
        x: Rows,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: StateName,
        *,
        silu: bool,
    ) -> Rows:
        """As `Kernels.causal_conv1d`; like the recurrences below, of float32 rows."""
        ...

    def ssd_scan(
        self,
        x: Rows,
        dt: Rows,
        a: torch.Tensor,
        b: Rows,
        c: Rows,
        d: torch.Tensor,
        state: StateName,
        groups: int,
    ) -> Rows:
        """As `Kernels.ssd_scan`, all heads beside each other."""
        ...

    def selective_scan(
        self,
        x: Rows,
        dt: Rows,
        a: torch.Tensor,
        b: Rows,
        c: Rows,
        d: torch.Tensor,
        state: StateName,
    ) -> Rows:
        """As `Kernels.selective_scan`."""
        ...

    def gated_delta(
        self, q: Rows, k: Rows, v: Rows, g: Rows, beta: Rows, state: StateName, key_heads: int
    ) -> Rows:
        """As `Kernels.gated_delta_rule`, all heads beside each other."""
        ...

    def final_norm(self, norm: NormWeights) -> Rows:
        """The result: hidden states of the rows that are wanted."""
        ...

    def greedy_head(self, hidden: Rows, matrix: Any, plain: bool) -> None:
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
