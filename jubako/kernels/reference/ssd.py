"""How does the reference run the recurrence of Mamba 2 over requests that go on from a state?

Requests with one token take one step of the recurrence. The tokens of the others are cut into
chunks: inside a chunk the recurrence is a masked matrix product (Dao and Gu 2024, section 6), and a
state is carried from chunk to chunk. Chunk d of every request is computed at once, so the number of
operators grows with the longest request, and temporaries hold one chunk a request.
"""

from __future__ import annotations

from functools import partial

import torch

from jubako.kernels.reference.scan_plan import Round, run_scan, scan_plan
from jubako.kernels.state_slots import StateSlots

CHUNK = 64
"""Most tokens of a chunk: work grows with it, the number of operators with its inverse."""


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    slots: StateSlots,
) -> torch.Tensor:
    """`S ← exp(dt·a)·S + dt·x⊗b`, `y = S·c + d·x` for each head; all in float32."""
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
    running *= (dt_rows * a).exp()[:, :, None, None]
    # Heads as [G, H / G], so that the heads of a group share b and c.
    grouped = running.unflatten(1, (b.shape[1], -1))
    new = (x_rows * dt_rows[:, :, None]).unflatten(1, (b.shape[1], -1))
    grouped.addcmul_(new[..., None], b[rows].float()[:, :, None, None, :])
    y = (grouped * c[rows].float()[:, :, None, None, :]).sum(-1).flatten(1, 2)
    out[rows] = y.addcmul_(x_rows, d[:, None]).to(out.dtype)


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
    heads, groups = x.shape[1], b.shape[1]
    # [c, H, Q, ...] throughout. A padded token changes nothing: its dt is 0.
    xs = x[part.tokens].float().transpose(1, 2)
    dts = dt[part.tokens].masked_fill(part.is_padding, 0.0).transpose(1, 2)
    bs = b[part.tokens].float().transpose(1, 2)
    cs = c[part.tokens].float().transpose(1, 2)
    steps = dts * a[:, None]
    decay = steps.cumsum(-1).exp_()
    # How much of what token s adds is left at token q ≥ s. Each is a sum of its own: a difference
    # of two sums from the chunk's beginning would have their error, which grows with them.
    above = torch.ones(size, size, dtype=torch.bool, device=x.device).triu()
    left = steps[..., None].masked_fill(above, 0.0).cumsum_(-2)
    left = left.masked_fill_(above.triu(1), -torch.inf).exp_()
    left_at_end = left[..., -1, :].clone()
    weights = left.unflatten(1, (groups, -1))
    weights *= (cs @ bs.transpose(-1, -2))[:, :, None]
    new = xs * dts[..., None]
    y = left @ new

    states = running[:count]
    by_group = states.unflatten(1, (groups, heads // groups))
    from_state = cs[:, :, None] @ by_group.transpose(-1, -2)
    y.addcmul_(from_state.flatten(1, 2), decay[..., None])
    y.addcmul_(xs, d[:, None, None])
    out[part.token_ids] = y.transpose(1, 2).flatten(0, 1)[part.places].to(out.dtype)

    new *= left_at_end[..., None]
    states *= decay[..., -1:, None]
    added = new.transpose(-1, -2).unflatten(1, (groups, -1)) @ bs[:, :, None]
    states += added.flatten(1, 2)
