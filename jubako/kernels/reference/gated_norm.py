"""How does the reference normalise what a gate is multiplied with?"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> torch.Tensor:
    """`norm(x · silu(gate))`, or `norm(x) · silu(gate)`; in float32, rounded at the end."""
    y, opening = x.float(), F.silu(gate.float())
    if not norm_before_gate:
        y = y * opening
    grouped = y.unflatten(-1, (-1, group_size or y.shape[-1]))
    mean = grouped.square().mean(-1, keepdim=True)
    y = (grouped * torch.rsqrt(mean + eps)).flatten(-2) * weight
    if norm_before_gate:
        y *= opening
    return y.to(x.dtype)
