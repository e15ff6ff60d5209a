"""Convolutions and recurrences equal one token after the other, however a step is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jubako.kernels.registry import get_kernels
from jubako.kernels.state_slots import StateSlots

from .states import STEPS, check_states, initial, make_slots, paged


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("width", "bias", "silu"), [(4, True, True), (2, False, False)])
def test_causal_conv1d(name: str, width: int, bias: bool, silu: bool) -> None:
    torch.manual_seed(0)
    step, channels = STEPS[name], 10
    slots = make_slots(step, np.random.default_rng(1))
    state = paged((width - 1, channels), slots, torch.float32)
    x = torch.randn(sum(step.lengths), channels)
    weight = torch.randn(channels, width)
    b = torch.randn(channels) if bias else None
    before = state.clone()
    got = get_kernels().causal_conv1d(x, weight, b, state, slots, silu=silu)
    states: dict[int, torch.Tensor] = {}
    for i in range(len(step.lengths)):
        start, end = slots.query_start_loc[i : i + 2].tolist()
        inputs = torch.cat([initial(before, slots, i), x[start:end].double()])
        want = F.conv1d(
            inputs.T[None], weight.double()[:, None], b if b is None else b.double(), groups=10
        )[0].T
        want = F.silu(want) if silu else want
        torch.testing.assert_close(got[start:end].double(), want, atol=1e-5, rtol=1e-5)
        for token in range(start, end):
            states[token] = inputs[token - start + 1 : token - start + width]
    check_states(state, before, slots, states)


def ssd_inputs(total: int, heads: int, groups: int) -> dict[str, Any]:
    return {
        "x": torch.randn(total, heads, 5),
        "dt": torch.rand(total, heads) * 2,
        "a": -torch.rand(heads) * 3,
        "b": torch.randn(total, groups, 7),
        "c": torch.randn(total, groups, 7),
        "d": torch.randn(heads),
    }


def recurrence(
    inputs: dict[str, Any], start: int, end: int, state: torch.Tensor
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Outputs of tokens `start` to `end`, and the state after each, in float64."""
    x, dt, a, b, c, d = (inputs[k].double() for k in ("x", "dt", "a", "b", "c", "d"))
    share = x.shape[1] // b.shape[1]
    outputs, states = [], {}
    for t in range(start, end):
        bs, cs = b[t].repeat_interleave(share, 0), c[t].repeat_interleave(share, 0)
        state = state * (dt[t] * a).exp()[:, None, None]
        state = state + (dt[t][:, None] * x[t])[:, :, None] * bs[:, None]
        outputs.append((state * cs[:, None]).sum(-1) + d[:, None] * x[t])
        states[t] = state
    return torch.stack(outputs), states


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 1), (3, 3)])
def test_ssd_scan(name: str, heads: int, groups: int) -> None:
    torch.manual_seed(0)
    step = STEPS[name]
    slots = make_slots(step, np.random.default_rng(2))
    state = paged((heads, 5, 7), slots, torch.float32)
    inputs = ssd_inputs(sum(step.lengths), heads, groups)
    before = state.clone()
    got = get_kernels().ssd_scan(**inputs, state=state, slots=slots)
    states: dict[int, torch.Tensor] = {}
    for i in range(len(step.lengths)):
        start, end = slots.query_start_loc[i : i + 2].tolist()
        want, own = recurrence(inputs, start, end, initial(before, slots, i))
        torch.testing.assert_close(got[start:end].double(), want, atol=1e-4, rtol=1e-4)
        states |= own
    check_states(state, before, slots, states)


def test_a_request_may_write_where_it_reads() -> None:
    torch.manual_seed(0)
    starts = np.array([0, 1, 80])
    blocks = np.array([3, 9])
    slots = StateSlots(starts, blocks, np.arange(2), starts[1:] - 1, blocks)
    state = paged((2, 5, 7), slots, torch.float32)
    inputs = ssd_inputs(80, 2, 1)
    before = state.clone()
    get_kernels().ssd_scan(**inputs, state=state, slots=slots)
    for i, block in enumerate(blocks.tolist()):
        start, end = starts[i : i + 2].tolist()
        _, states = recurrence(inputs, start, end, before[block].double())
        torch.testing.assert_close(state[block].double(), states[end - 1], atol=1e-4, rtol=1e-4)


def test_strong_decay_keeps_its_precision() -> None:
    """Sums of large exponents are not taken apart again: each weight is exact by itself."""
    torch.manual_seed(0)
    slots = StateSlots.without_state(200)
    inputs = ssd_inputs(200, 2, 1)
    # Now and then everything is forgotten, and nothing put in its place.
    inputs["dt"][::16] = 300.0
    inputs["x"][::16] = 0.0
    got = get_kernels().ssd_scan(**inputs, state=torch.empty(0, 2, 5, 7), slots=slots)
    want, _ = recurrence(inputs, 0, 200, torch.zeros(2, 5, 7, dtype=torch.float64))
    assert ((got - want).abs() / (1 + want.abs())).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [False, True])
def test_gated_rms_norm(dtype: torch.dtype, before: bool) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(5, 12).to(dtype), torch.randn(5, 12).to(dtype)
    weight = torch.randn(12)
    got = get_kernels().gated_rms_norm(x, gate, weight, 1e-5, group_size=4, norm_before_gate=before)
    assert got.dtype is dtype
    y = x.double() if before else x.double() * F.silu(gate.double())
    want = torch.cat([F.rms_norm(part, (4,), eps=1e-5) for part in y.split(4, dim=1)], dim=1)
    want = want * weight
    if before:
        want = want * F.silu(gate.double())
    torch.testing.assert_close(
        got.double(), want, rtol=8e-3 if dtype.itemsize == 2 else 1e-5, atol=1e-6
    )
