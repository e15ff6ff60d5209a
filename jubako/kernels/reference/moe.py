"""How does the reference compute a mixture of experts?

Tokens are sorted by expert, so that each expert that has tokens multiplies by its matrices once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jubako.kernels.reference import activation


def pack_experts(
    up: torch.Tensor, down: torch.Tensor, gated: bool = True, quantization: str = "none"
) -> Any:
    """None: PyTorch reads matrices best as they are."""
    del up, down, gated, quantization
    return None


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    act: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.702,
    weigh_input: bool = False,
) -> torch.Tensor:
    """Experts' answers to x [T, hidden], weighted and summed; see `Kernels.fused_experts`."""
    k = expert_ids.shape[1]
    flat_ids = expert_ids.flatten()
    order = flat_ids.argsort(stable=True)
    tokens = order // k
    sorted_weights = weights.flatten()[order].float()[:, None]
    counts = torch.bincount(flat_ids, minlength=gate_up.shape[0]).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        part = slice(start, start + count)
        start += count
        own = tokens[part]
        inputs = x[own]
        if weigh_input:
            inputs = (inputs * sorted_weights[part]).to(x.dtype)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = _activate(F.linear(inputs, gate_up[expert], bias), act, limit, alpha)
        bias = None if down_bias is None else down_bias[expert]
        answer = F.linear(hidden, down[expert], bias).float()
        if not weigh_input:
            answer.mul_(sorted_weights[part])
        # One expert has a token at most once, and experts come in order: the sum of a token does
        # not depend on which others share its step.
        out.index_add_(0, own, answer)
    return out.to(x.dtype)


def _activate(gate_up: torch.Tensor, act: str, limit: float | None, alpha: float) -> torch.Tensor:
    if act == "clamped_swiglu":
        return clamped_swiglu(gate_up, limit, alpha)
    return _ACTIVATIONS[act](gate_up)


_ACTIVATIONS = {
    "silu": activation.silu_and_mul,
    "gelu": activation.gelu_and_mul,
    "gelu_tanh": activation.gelu_tanh_and_mul,
}


def clamped_swiglu(gate_up: torch.Tensor, limit: float | None, alpha: float) -> torch.Tensor:
    """`gate · sigmoid(alpha · gate) · (up + 1)`, both clamped at `limit`, up also from below.

    gate_up [T, 2 · size], gate first → [T, size]; it may be overwritten (OpenAI 2025, gpt-oss
    model card, arXiv 2508.10925).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp_(max=limit), up.clamp_(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up + 1)
