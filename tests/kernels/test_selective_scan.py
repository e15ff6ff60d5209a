"""The recurrence of Mamba 1 equals one token after the other, however a step is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jubako.kernels.registry import get_kernels
from jubako.kernels.state_slots import StateSlots

from .states import STEPS, check_states, initial, make_slots, paged

CHANNELS, STATE = 6, 7


def make_inputs(total: int) -> dict[str, Any]:
    return {
        "x": torch.randn(total, CHANNELS),
        "dt": torch.rand(total, CHANNELS) * 2,
        "a": -torch.rand(CHANNELS, STATE) * 3,
        "b": torch.randn(total, STATE),
        "c": torch.randn(total, STATE),
        "d": torch.randn(CHANNELS),
    }


def recurrence(
    inputs: dict[str, Any], start: int, end: int, state: torch.Tensor
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Outputs of tokens `start` to `end`, and the state after each, in float64."""
    x, dt, a, b, c, d = (inputs[name].double() for name in ("x", "dt", "a", "b", "c", "d"))
    outputs, states = [], {}
    for t in range(start, end):
        state = state * (dt[t][:, None] * a).exp() + (dt[t] * x[t])[:, None] * b[t]
        outputs.append((state * c[t]).sum(-1) + d * x[t])
        states[t] = state
    return torch.stack(outputs), states


@pytest.mark.parametrize("name", STEPS)
def test_selective_scan(name: str) -> None:
    torch.manual_seed(0)
    step = STEPS[name]
    slots = make_slots(step, np.random.default_rng(2))
    state = paged((CHANNELS, STATE), slots, torch.float32)
    inputs = make_inputs(sum(step.lengths))
    before = state.clone()
    got = get_kernels().selective_scan(**inputs, state=state, slots=slots)
    states: dict[int, torch.Tensor] = {}
    for i in range(len(step.lengths)):
        start, end = slots.query_start_loc[i : i + 2].tolist()
        want, own = recurrence(inputs, start, end, initial(before, slots, i))
        torch.testing.assert_close(got[start:end].double(), want, atol=1e-4, rtol=1e-4)
        states |= own
    check_states(state, before, slots, states)


def test_strong_decay_keeps_its_precision() -> None:
    torch.manual_seed(0)
    slots = StateSlots.without_state(200)
    inputs = make_inputs(200)
    # Now and then everything is forgotten, and nothing put in its place.
    inputs["dt"][::16] = 300.0
    inputs["x"][::16] = 0.0
    got = get_kernels().selective_scan(**inputs, state=torch.empty(0, CHANNELS, STATE), slots=slots)
    want, _ = recurrence(inputs, 0, 200, torch.zeros(CHANNELS, STATE, dtype=torch.float64))
    assert ((got - want).abs() / (1 + want.abs())).max() < 1e-5
