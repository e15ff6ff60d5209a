"""How does a layer choose experts for its tokens and ask them?

A router gives each token a score for every expert; one of the functions below makes of them the
experts that are asked and the weights of their answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jubako.errors import UnsupportedModelError
from jubako.kernels.cpu.recording import (
    ExpertChoice,
    ExpertRules,
    Program,
    RecordingError,
    Rows,
)
from jubako.kernels.registry import get_kernels
from jubako.layers.linear import RowParallelLinear
from jubako.layers.weights import WeightTarget, parameter, whole_parameter

CLAMPED_SWIGLU = "clamped_swiglu"

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    CLAMPED_SWIGLU: CLAMPED_SWIGLU,
}


def softmax_top_k(
    logits: torch.Tensor, k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest softmax probabilities of logits [T, E], as weights and expert ids [T, k].

    With `renormalize` the weights of a token sum to 1. Float32 and int64, as all functions here.
    """
    weights, expert_ids = logits.float().softmax(-1).topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, expert_ids


def top_k_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of logits [T, E], and their softmax among themselves."""
    chosen, expert_ids = logits.float().topk(k, dim=-1)
    return chosen.softmax(-1), expert_ids


def top_k_sigmoid(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of logits [T, E], each through a sigmoid of its own."""
    chosen, expert_ids = logits.float().topk(k, dim=-1)
    return chosen.sigmoid(), expert_ids


def pack_expert_parameters(
    kernels: Any, up: nn.Parameter, down: nn.Parameter, quantization: str, gated: bool = True
) -> tuple[Any, Any]:
    """As `Kernels.pack_experts`, and the parameters' memory given back; twice None if they stay."""
    packed = kernels.pack_experts(up.data, down.data, gated, quantization)
    if packed is None:
        return None, None
    for weight in (up, down):
        weight.data = weight.data.new_empty(0)
    matrices: tuple[Any, Any] = packed
    return matrices


class Float32Router(nn.Module):
    """Scores of the experts for each token, computed in float32 whatever the model's dtype."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = parameter(num_experts, hidden_size)
        self.kernels = get_kernels()
        self.packed: Any = None
        """The weight in float32, in the form that the kernels like best, instead of `weight`."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, E] float32."""
        if self.packed is not None:
            return self.kernels.packed_linear(x.float(), self.packed)
        return self.kernels.linear(x.float(), self.weight.float())

    def pack(self, quantization: str = "none") -> None:
        """Let the kernels take over the weight, once it is loaded; it is never quantised."""
        del quantization
        if self.packed is None:
            self.packed = self.kernels.pack(self.weight.data.float())
            if self.packed is not None:
                self.weight.data = self.weight.data.new_empty(0)

    def record_logits(self, program: Program, x: Rows) -> Rows:
        """As `logits`, in a program."""
        if self.packed is None:
            raise RecordingError("a router that is not packed")
        return program.linear(x, self.packed, None, "router")


class Router(RowParallelLinear):
    """Scores of the experts for each token. It is small, and never quantised."""

    def pack(self, quantization: str = "none", interleaved: bool = False) -> None:
        """Let the kernels take over the weight, as it is."""
        super().pack(interleaved=interleaved)


class Experts(nn.Module):
    """The gated MLPs of a layer's experts: matrices [E, 2 · size, hidden] and [E, hidden, size].

    A checkpoint has them in one of three forms: a tensor for each matrix of each expert
    (`0.gate_proj.weight`); all experts' in one, `gate_up_proj` and `down_proj`, shaped like those
    here; or, if `transposed`, with the last two dimensions exchanged, where with `interleaved` gate
    and up take turns. The first two may both occur. Biases, `gate_up_proj_bias` [E, 2 · size] and
    `down_proj_bias` [E, hidden], interleave likewise. `limit` and `alpha` as for
    `Kernels.fused_experts`; with `weigh_input` weights multiply the experts' input.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        transposed: bool = False,
        interleaved: bool = False,
        bias: bool = False,
        limit: float | None = None,
        alpha: float = 1.702,
        weigh_input: bool = False,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"The experts' activation {activation!r} is not supported; "
                f"known are {', '.join(_ACTIVATIONS)}."
            )
        assert transposed or not interleaved, "only transposed matrices interleave"
        self.num_experts = num_experts
        self.intermediate_size = intermediate_size
        self.activation = _ACTIVATIONS[activation]
        self.transposed = transposed
        self.interleaved = interleaved
        self.limit = limit
        self.alpha = alpha
        self.weigh_input = weigh_input
        self.gate_up = parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.down = parameter(num_experts, hidden_size, intermediate_size)
        self.gate_up_bias = parameter(num_experts, 2 * intermediate_size) if bias else None
        self.down_bias = parameter(num_experts, hidden_size) if bias else None
        self.kernels = get_kernels()
        # The matrices in the form that the kernels like best, instead of `gate_up` and `down`.
        self.packed_up: Any = None
        self.packed_down: Any = None

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """x [T, hidden], weights and ids [T, k] → the weighted sum of answers, [T, hidden]."""
        if self.packed_up is not None:
            packed = (self.packed_up, self.packed_down)
            return self.kernels.packed_experts(x, packed, weights, expert_ids, self._rules)
        return self.kernels.fused_experts(
            x,
            self.gate_up,
            self.down,
            weights,
            expert_ids,
            act=self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            limit=self.limit,
            alpha=self.alpha,
            weigh_input=self.weigh_input,
        )

    def pack(self, quantization: str = "none") -> None:
        """Let the kernels take over the matrices, once they are loaded; see `Kernels.pack`."""
        if self.packed_up is None:
            self.packed_up, self.packed_down = pack_expert_parameters(
                self.kernels, self.gate_up, self.down, quantization
            )

    @property
    def _rules(self) -> ExpertRules:
        return ExpertRules(
            self.activation,
            None if self.gate_up_bias is None else self.gate_up_bias.data.float(),
            None if self.down_bias is None else self.down_bias.data.float(),
            self.limit,
            self.alpha,
            self.weigh_input,
        )

    def record(
        self,
        program: Program,
        x: Rows,
        logits: Rows,
        routing: ExpertChoice,
        role: str = "delta",
        *,
        to_stream: bool = False,
    ) -> Rows:
        """As `forward` by the experts that a router's logits choose, in a program."""
        if self.packed_up is None:
            raise RecordingError("experts that are not packed")
        packed = (self.packed_up, self.packed_down)
        return program.experts(x, logits, routing, packed, self._rules, role, to_stream=to_stream)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The tensors of the forms above."""
        if self.transposed:
            yield f"{name}.gate_up_proj", self._gate_up_target(self.gate_up.data.mT)
            down = self.down.data.mT
            yield f"{name}.down_proj", WeightTarget(down, tuple(down.shape))
        else:
            yield from self._targets_of_each(name)
        if self.gate_up_bias is not None:
            yield f"{name}.gate_up_proj_bias", self._gate_up_target(self.gate_up_bias.data)
        if self.down_bias is not None:
            yield f"{name}.down_proj_bias", whole_parameter(self.down_bias)

    def _gate_up_target(self, view: torch.Tensor) -> WeightTarget:
        """A target of gates and ups along the last dimension of `view`."""
        shape = tuple(view.shape)
        if not self.interleaved:
            return WeightTarget(view, shape)
        return _PairsTarget(view.unflatten(-1, (2, -1)).mT, shape)

    def _targets_of_each(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        size = self.intermediate_size
        gate_ups, downs = [], []
        for expert in range(self.num_experts):
            gate_up, down = self.gate_up.data[expert], self.down.data[expert]
            parts = (("gate_proj", gate_up[:size]), ("up_proj", gate_up[size:]))
            for part, view in parts:
                gate_ups.append(f"{name}.{expert}.{part}.weight")
                yield gate_ups[-1], WeightTarget(view, tuple(view.shape))
            downs.append(f"{name}.{expert}.down_proj.weight")
            yield downs[-1], WeightTarget(down, tuple(down.shape))
        yield f"{name}.gate_up_proj", whole_parameter(self.gate_up, parts=tuple(gate_ups))
        yield f"{name}.down_proj", whole_parameter(self.down, parts=tuple(downs))


class _PairsTarget(WeightTarget):
    """A tensor [..., 2 · n] whose neighbours are a pair, for a view [..., n, 2]."""

    def load(self, tensor: torch.Tensor) -> None:
        """Take `tensor`, whose shape has been checked."""
        self.view.copy_(tensor.unflatten(-1, (-1, 2)))
