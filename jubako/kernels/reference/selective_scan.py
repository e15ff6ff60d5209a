"""How does the reference run the recurrence of Mamba 1 over requests that go on from a state?

A request's one token takes one step of the recurrence. A chunk of tokens is cut into spans. What a
span makes of any state is one factor and one addition, found for all spans at once; then the state
goes through the spans one by one (a scan in two levels: Blelloch 1990), and on to the next chunk.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from jubako.kernels.reference.scan_plan import Round, run_scan, scan_plan
from jubako.kernels.state_slots import StateSlots

CHUNK = 32
"""Most tokens of a chunk: memory grows with it, the number of operators with its inverse."""
SPAN = 8
"""Tokens of a span. Operators of a chunk: a few for each token of a span and for each span."""


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    slots: StateSlots,
) -> torch.Tensor:
    """`S ← exp(dt·a)·S + dt·x⊗b`, `y = S·c + d·x` for each channel; all in float32."""
    plan = scan_plan(slots, CHUNK, x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    inputs = (out, x, dt, a, b, c, d)
    run_scan(plan, state, partial(_step, *inputs), partial(_chunk, *inputs))
    return out


def _step(
    out: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    running: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """One token of each decode."""
    dt_rows, x_rows = dt[rows], x[rows].float()
    running *= (dt_rows[..., None] * a).exp_()
    running.addcmul_((x_rows * dt_rows)[..., None], b[rows].float()[:, None])
    y = (running @ c[rows].float()[..., None]).squeeze(-1)
    out[rows] = y.addcmul_(x_rows, d).to(out.dtype)


def _chunk(
    out: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    running: torch.Tensor,
    part: Round,
) -> None:
    """One chunk of each of the first requests of `running`, whose states are brought forward."""
    count, size = part.tokens.shape
    missing = -size % SPAN
    tokens = F.pad(part.tokens, (0, missing))
    is_padding = F.pad(part.is_padding, (0, 0, 0, missing), value=True)
    # [c, spans, SPAN, C, N]: by what the tokens of a span up to each one multiply a state, and what
    # they add. A padded token changes nothing: its dt is 0.
    xs = x[tokens].float()
    dts = dt[tokens].masked_fill(is_padding, 0.0)
    factor = (dts[..., None] * a).exp_().unflatten(1, (-1, SPAN))
    added = ((xs * dts)[..., None] * b[tokens].float()[:, :, None]).unflatten(1, (-1, SPAN))
    for i in range(1, SPAN):
        added[:, :, i].addcmul_(factor[:, :, i], added[:, :, i - 1])
        factor[:, :, i] *= factor[:, :, i - 1]
    states = running[:count]
    before = states[:, None]
    for span in range(added.shape[1]):
        added[:, span].addcmul_(factor[:, span], before)
        before = added[:, span, -1:]
    states.copy_(before[:, 0])
    y = (added.flatten(1, 2) @ c[tokens].float()[..., None]).squeeze(-1).addcmul_(xs, d)
    out[part.token_ids] = y[:, :size].flatten(0, 1)[part.places].to(out.dtype)
