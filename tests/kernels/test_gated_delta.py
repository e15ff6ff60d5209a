"""The gated delta rule equals one token after the other, however a step is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jubako.kernels.registry import get_kernels
from jubako.kernels.state_slots import StateSlots

from .states import STEPS, check_states, initial, make_slots, paged

KEY, VALUE = 7, 5


def make_inputs(total: int, value_heads: int, key_heads: int) -> dict[str, Any]:
    return {
        "q": torch.randn(total, key_heads, KEY) * 3,
        "k": torch.randn(total, key_heads, KEY) * 3,
        "v": torch.randn(total, value_heads, VALUE),
        "g": -torch.rand(total, value_heads),
        "beta": torch.rand(total, value_heads),
    }


def recurrence(
    inputs: dict[str, Any], start: int, end: int, state: torch.Tensor
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Outputs of tokens `start` to `end`, and the state after each, in float64."""
    q, k, v, g, beta = (inputs[name].double() for name in ("q", "k", "v", "g", "beta"))
    share = v.shape[1] // k.shape[1]
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(share, 1)
        for x in (q, k)
    )
    outputs, states = [], {}
    for t in range(start, end):
        state = state * g[t].exp()[:, None, None]
        missing = v[t] - (state * k[t][:, None]).sum(-1)
        state = state + (beta[t][:, None] * missing)[:, :, None] * k[t][:, None]
        outputs.append((state * q[t][:, None]).sum(-1) / KEY**0.5)
        states[t] = state
    return torch.stack(outputs), states


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("value_heads", "key_heads"), [(6, 2), (4, 1), (3, 3)])
def test_gated_delta_rule(name: str, value_heads: int, key_heads: int) -> None:
    torch.manual_seed(0)
    step = STEPS[name]
    slots = make_slots(step, np.random.default_rng(2))
    state = paged((value_heads, VALUE, KEY), slots, torch.float32)
    inputs = make_inputs(sum(step.lengths), value_heads, key_heads)
    before = state.clone()
    got = get_kernels().gated_delta_rule(**inputs, state=state, slots=slots)
    states: dict[int, torch.Tensor] = {}
    for i in range(len(step.lengths)):
        start, end = slots.query_start_loc[i : i + 2].tolist()
        want, own = recurrence(inputs, start, end, initial(before, slots, i))
        torch.testing.assert_close(got[start:end].double(), want, atol=1e-4, rtol=1e-4)
        states |= own
    check_states(state, before, slots, states)


@pytest.mark.parametrize(
    "case", ["the same key again and again", "keys of zeros", "everything forgotten now and then"]
)
def test_extremes_keep_their_precision(case: str) -> None:
    torch.manual_seed(0)
    slots = StateSlots.without_state(200)
    inputs = make_inputs(200, 2, 1)
    if case.startswith("the same"):
        inputs["k"][:] = inputs["k"][0]
        inputs["beta"][:], inputs["g"][:] = 1.0, 0.0
    elif case.startswith("keys"):
        inputs["k"][::3] = 0.0
    else:
        inputs["g"][::16] = -600.0
    got = get_kernels().gated_delta_rule(**inputs, state=torch.empty(0, 2, VALUE, KEY), slots=slots)
    want, _ = recurrence(inputs, 0, 200, torch.zeros(2, VALUE, KEY, dtype=torch.float64))
    assert ((got - want).abs() / (1 + want.abs())).max() < 1e-5


def test_bfloat16_is_computed_in_float32() -> None:
    """Only what is stored is rounded."""
    torch.manual_seed(0)
    slots = make_slots(STEPS["long and short"], np.random.default_rng(3))
    state = paged((4, VALUE, KEY), slots, torch.float32)
    inputs = make_inputs(sum(STEPS["long and short"].lengths), 4, 2)
    rounded = {n: x.bfloat16() if n in "qkv" else x for n, x in inputs.items()}
    exact = {n: x.float() for n, x in rounded.items()}
    other = state.clone()
    got = get_kernels().gated_delta_rule(**rounded, state=state, slots=slots)
    want = get_kernels().gated_delta_rule(**exact, state=other, slots=slots)
    assert torch.equal(got, want.bfloat16())
    assert torch.equal(state[slots.write_blocks], other[slots.write_blocks])
