"""How does the reference run the gated delta rule over requests that go on from a state?

A request's one token takes one step of the recurrence. In a chunk of tokens each writes to the
state what its key does not find there yet, which depends on what the tokens before it wrote: a
triangular system of equations for all of them at once (Yang, Kautz and Hatamizadeh 2024, arXiv
2412.06464, section 3.3). A state is carried from chunk to chunk.
"""

from __future__ import annotations

from functools import partial

import torch

from jubako.kernels.reference.scan_plan import Round, run_scan, scan_plan
from jubako.kernels.state_slots import StateSlots

CHUNK = 64
"""Most tokens of a chunk: work grows with it, the number of operators with its inverse."""
LENGTH_EPS = 1e-6
"""Added to the square of a vector's length, which may be 0."""


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: StateSlots,
) -> torch.Tensor:
    """`S ← exp(g)·S`, `S ← S + beta·(v - S·k)⊗k`, `y = S·q` for each head; all in float32."""
    plan = scan_plan(slots, CHUNK, v.device)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    inputs = (out, q, k, v, g, beta)
    run_scan(plan, state, partial(_step, *inputs), partial(_chunk, *inputs))
    return out


def _directions(
    q: torch.Tensor, k: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of length 1 / sqrt(Dk) and keys of length 1, one for each value head."""
    pair = torch.stack((q, k)).float()
    pair *= pair.square().sum(-1, keepdim=True).add_(LENGTH_EPS).rsqrt_()
    pair[0] *= q.shape[-1] ** -0.5
    queries, keys = pair.repeat_interleave(num_heads // k.shape[-2], dim=-2)
    return queries, keys


def _step(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    running: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """One token of each decode."""
    queries, keys = _directions(q[rows], k[rows], v.shape[1])
    running *= g[rows].exp()[:, :, None, None]
    found = (running @ keys[..., None]).squeeze(-1)
    written = (v[rows].float() - found) * beta[rows][..., None]
    running.addcmul_(written[..., None], keys[:, :, None])
    out[rows] = (running @ queries[..., None]).squeeze(-1).to(out.dtype)


def _chunk(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    running: torch.Tensor,
    part: Round,
) -> None:
    """One chunk of each of the first requests of `running`, whose states are brought forward."""
    count, size = part.tokens.shape
    # [c, H, Q, ...] throughout. A padded token changes nothing: it writes nothing, and g is 0.
    queries, keys = _directions(q[part.tokens], k[part.tokens], v.shape[1])
    qs, ks = queries.transpose(1, 2), keys.transpose(1, 2)
    vs = v[part.tokens].float().transpose(1, 2)
    gs = g[part.tokens].masked_fill(part.is_padding, 0.0).transpose(1, 2)
    betas = beta[part.tokens].masked_fill(part.is_padding, 0.0).transpose(1, 2)[..., None]
    decay = gs.cumsum(-1).exp_()[..., None]
    # How much of what token s writes is left at token t ≥ s. Each is a sum of its own: a difference
    # of two sums from the chunk's beginning would have their error, which grows with them.
    above = torch.ones(size, size, dtype=torch.bool, device=v.device).triu()
    left = gs[..., None].expand(*gs.shape, size).masked_fill(above, 0.0).cumsum_(-2)
    left.masked_fill_(above.triu(1), -torch.inf).exp_()

    states = running[:count]
    found = (ks @ states.mT).mul_(decay)
    # Row t: what token t writes, plus beta times what its key finds of earlier writings, is
    # beta times what it would write alone.
    earlier = (ks @ ks.mT).mul_(left).mul_(betas)
    written = torch.linalg.solve_triangular(
        earlier, (vs - found).mul_(betas), upper=False, unitriangular=True
    )
    y = (qs @ states.mT).mul_(decay)
    y += (qs @ ks.mT).mul_(left) @ written
    out[part.token_ids] = y.transpose(1, 2).flatten(0, 1)[part.places].to(out.dtype)

    states *= decay[..., -1:, :]
    states += (written * left[..., -1, :, None]).mT @ ks
