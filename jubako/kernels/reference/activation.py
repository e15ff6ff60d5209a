"""How does the reference compute the gated activations of an MLP?"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up`: gate_up [T, 2 · size], gate first → [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) · up`, GELU in its tanh form (Hendrycks and Gimpel 2016)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) · up`, GELU in its exact form."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)
