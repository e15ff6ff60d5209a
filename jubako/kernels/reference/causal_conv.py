"""How does the reference run a short causal convolution over requests that go on from a state?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from jubako.kernels.state_slots import StateSlots


@dataclass(frozen=True)
class _Plan:
    """Row numbers in the inputs of a step with each request's kept inputs set before its own."""

    num_rows: int
    first_rows: torch.Tensor
    """[T]: of each token, the row of the oldest input that its output depends on."""
    token_rows: torch.Tensor
    """[T]: the token's own row."""
    kept_rows: torch.Tensor
    """[r, k - 1]: rows of the kept inputs of requests that have some."""
    read_blocks: torch.Tensor
    """[r]."""
    written_rows: torch.Tensor
    """[w, k - 1]: rows that a block keeps."""
    write_blocks: torch.Tensor
    """[w]."""


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: StateSlots,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Each channel's sum of its last k inputs times weights; in float32, rounded at the end."""
    channels, width = weight.shape
    plan = _plan(slots, width, x.device)
    rows = x.new_zeros(plan.num_rows, channels)
    rows[plan.token_rows] = x
    rows[plan.kept_rows] = state[plan.read_blocks].to(x.dtype)
    taps = weight.float().T
    out = rows[plan.first_rows].float() * taps[0]
    for j in range(1, width):
        out.addcmul_(rows[plan.first_rows + j].float(), taps[j])
    if bias is not None:
        out += bias
    if silu:
        out = torch.nn.functional.silu(out, inplace=True)
    state[plan.write_blocks] = rows[plan.written_rows].to(state.dtype)
    return out.to(x.dtype)


def _plan(slots: StateSlots, width: int, device: torch.device) -> _Plan:
    key = ("causal_conv1d", width, device)
    plan = slots.plans.get(key)
    if plan is None:
        plan = slots.plans[key] = _make_plan(slots, width, device)
    return plan


def _make_plan(slots: StateSlots, width: int, device: torch.device) -> _Plan:
    kept = width - 1
    starts = slots.query_start_loc
    n, total = len(starts) - 1, int(starts[-1])
    requests = np.arange(n).repeat(slots.query_lens)
    token_rows = np.arange(total) + kept * (requests + 1)
    before = starts[:-1, None] + kept * np.arange(n)[:, None] + np.arange(kept)
    has_state = slots.read_blocks >= 0

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return _Plan(
        num_rows=total + kept * n,
        first_rows=tensor(token_rows - kept),
        token_rows=tensor(token_rows),
        kept_rows=tensor(before[has_state]),
        read_blocks=tensor(slots.read_blocks[has_state]),
        written_rows=tensor(token_rows[slots.write_tokens][:, None] - kept + 1 + np.arange(kept)),
        write_blocks=tensor(slots.write_blocks),
    )
