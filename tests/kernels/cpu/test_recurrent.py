"""Native convolutions and recurrences pass the reference's tests, at every level."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from jubako.kernels.cpu.library import Pool
from jubako.kernels.cpu.recurrent import RecurrentKernels
from jubako.kernels.state_slots import StateSlots

from .. import test_gated_delta as delta
from .. import test_recurrent as recurrent
from .. import test_selective_scan as selective
from ..states import STEPS

SHAPES = [(6, 2), (4, 1), (3, 3)]


@pytest.fixture(autouse=True)
def native(native_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> RecurrentKernels:
    """Kernels of one level, which the reference's tests get instead of theirs."""
    kernels = RecurrentKernels(native_pool)
    for module in (delta, recurrent, selective):
        monkeypatch.setattr(module, "get_kernels", lambda: kernels)
    return kernels


def test_steps_of_every_kind() -> None:
    for name in STEPS:
        recurrent.test_causal_conv1d(name, 4, True, True)
        recurrent.test_causal_conv1d(name, 2, False, False)
        selective.test_selective_scan(name)
        for heads, groups in SHAPES:
            recurrent.test_ssd_scan(name, heads, groups)
            delta.test_gated_delta_rule(name, heads, groups)


def test_a_request_may_write_where_it_reads() -> None:
    recurrent.test_a_request_may_write_where_it_reads()


def test_extremes_keep_their_precision() -> None:
    recurrent.test_strong_decay_keeps_its_precision()
    selective.test_strong_decay_keeps_its_precision()
    for case in ("the same key again and again", "keys of zeros", "everything forgotten"):
        delta.test_extremes_keep_their_precision(case)


def _inputs(name: str, total: int, dtype: torch.dtype) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The state's shape and inputs of sizes that fill registers and do not."""

    def rows(*shape: int) -> torch.Tensor:
        # As parts of a wider product, whose rows are apart.
        return torch.randn(total, 3, *shape).to(dtype)[:, 1]

    if name == "causal_conv1d":
        return (3, 150), {"x": rows(150), "weight": torch.randn(150, 4), "bias": None}
    if name == "ssd_scan":
        inputs = {"x": rows(4, 18), "b": rows(2, 33), "c": rows(2, 33)}
        dt, a, d = torch.rand(total, 4), -torch.rand(4), torch.randn(4)
        return (4, 18, 33), {**inputs, "dt": dt, "a": a, "d": d}
    if name == "selective_scan":
        inputs = {"x": rows(37), "b": rows(16), "c": rows(16)}
        dt, a, d = torch.rand(total, 37), -torch.rand(37, 16), torch.randn(37)
        return (37, 16), {**inputs, "dt": dt, "a": a, "d": d}
    inputs = {"q": rows(2, 33), "k": rows(2, 33), "v": rows(4, 18)}
    g, beta = -torch.rand(total, 4), torch.rand(total, 4)
    return (4, 18, 33), {**inputs, "g": g, "beta": beta}


NAMES = ["causal_conv1d", "ssd_scan", "selective_scan", "gated_delta_rule"]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_chunks_has_the_same_bits(native: RecurrentKernels, name: str) -> None:
    torch.manual_seed(0)
    total, blocks = 60, np.array([1])
    shape, inputs = _inputs(name, total, torch.float32)
    op = getattr(native, name)
    state = torch.full((2, *shape), torch.nan)

    def run(begin: int, end: int) -> torch.Tensor:
        read = blocks if begin else np.array([-1])
        slots = StateSlots(
            np.array([0, end - begin]), read, np.array([0]), np.array([end - begin - 1]), blocks
        )
        part = {
            k: v[begin:end] if v is not None and len(v) == total else v for k, v in inputs.items()
        }
        result: torch.Tensor = op(**part, state=state, slots=slots)
        return result

    want = run(0, total)
    kept = state[1].clone()
    cuts = [0, 1, 2, 20, 21, 59, 60]
    got = torch.cat([run(a, b) for a, b in itertools.pairwise(cuts)])
    assert torch.equal(got, want)
    assert torch.equal(state[1], kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16(native: RecurrentKernels, name: str, state_dtype: torch.dtype) -> None:
    from jubako.kernels.reference.kernels import ReferenceKernels

    torch.manual_seed(0)
    total = 30
    shape, inputs = _inputs(name, total, torch.bfloat16)
    state = torch.randn(3, *shape).to(state_dtype)
    starts, ends = np.array([0, 1, 30]), np.array([0, 29])
    slots = StateSlots(starts, np.array([2, 0]), np.arange(2), ends, np.array([2, 1]))
    expected = state.clone()
    want = getattr(ReferenceKernels, name)(**inputs, state=expected, slots=slots)
    got = getattr(native, name)(**inputs, state=state, slots=slots)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state, expected, atol=2e-2, rtol=2e-2)


def test_what_is_not_taken_is_left_to_others(native: RecurrentKernels) -> None:
    x = torch.ones(2, 8, dtype=torch.float16)
    state = torch.zeros(1, 3, 8)
    slots = StateSlots.without_state(2)
    out = native.causal_conv1d(x, torch.ones(8, 4, dtype=torch.float16), None, state, slots)
    assert out.tolist() == [[1.0] * 8, [2.0] * 8]
