"""Ops of a program between its products equal their formulas in float64, at every level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jubako.kernels.cpu.library import F32, Pool, program_array
from jubako.kernels.cpu.pointwise_ops import PointwiseOps
from jubako.kernels.cpu.recording import GatedNormWeights, RecordingError, Rows
from jubako.kernels.reference.gated_norm import gated_rms_norm

ROWS = 5


class Ops(PointwiseOps):
    """Runs what was recorded, on rows that tests fill and look at."""

    def __init__(self, pool: Pool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype, ROWS, ROWS, pool)
        self._counts[0] = ROWS

    def view(self, rows: Rows) -> torch.Tensor:
        """The rows' numbers; other columns of the buffer are not among them."""
        for whole, memory in self._buffers.values():
            size = 4 if whole.dtype == F32 else 2
            start = (rows.address - whole.address) // size
            if 0 <= start < whole.stride and rows.dtype == whole.dtype:
                dtype = torch.float32 if whole.dtype == F32 else torch.bfloat16
                flat = torch.frombuffer(memory.buffer(), dtype=dtype)
                return flat.view(-1, whole.stride)[:ROWS, start : start + rows.width]
        raise AssertionError("no buffer has these rows")

    def put(self, role: str, x: torch.Tensor) -> Rows:
        """A buffer that holds x."""
        rows = self.buffer(role, x.shape[1], F32)
        self.view(rows).copy_(x)
        return rows

    def go(self) -> None:
        self._pool.run_program(program_array(self._ops), len(self._ops))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_with_bias_limits_and_factor(native_pool: Pool, function: str) -> None:
    torch.manual_seed(0)
    x = torch.linspace(-30, 30, ROWS * 600).view(ROWS, 600)
    bias, factor = torch.randn(600), torch.randn(600)
    ops = Ops(native_pool)
    plain = ops.pointwise(ops.put("x", x), function, "plain")
    all_of_it = ops.pointwise(
        ops.put("x", x), function, "all", bias=bias, factor=factor, limits=(-0.5, 9.0)
    )
    ops.go()
    want = FUNCTIONS[function](x.double())
    torch.testing.assert_close(ops.view(plain), want.float(), rtol=3e-6, atol=1e-6)
    want = FUNCTIONS[function]((x + bias).double()).clamp(-0.5, 9.0) * factor
    torch.testing.assert_close(ops.view(all_of_it), want.float(), rtol=3e-6, atol=3e-6)


def test_some_columns_in_place_and_rounded(native_pool: Pool) -> None:
    x = torch.randn(ROWS, 70)
    ops = Ops(native_pool, torch.bfloat16)
    rows = ops.put("x", x)
    ops.pointwise(rows.columns(3, 50), "identity", None, factor=2.0)
    rounded = ops.pointwise(rows, "identity", "rounded", dtype=ops.dtype)
    ops.go()
    want = x.clone()
    want[:, 3:53] *= 2
    assert torch.equal(ops.view(rows), want)
    assert torch.equal(ops.view(rounded), want.bfloat16())


def test_gates_of_elements_and_of_rows(native_pool: Pool) -> None:
    x, gate, one = torch.randn(ROWS, 90), torch.randn(ROWS, 90), torch.randn(ROWS, 1)
    ops = Ops(native_pool)
    rows = ops.put("x", x)
    by_element = ops.gate(rows, ops.put("gate", gate), "silu", "by element")
    by_row = ops.gate(rows, ops.put("one", one), "sigmoid", "by row")
    ops._stream = ops.put("stream", torch.ones(ROWS, 90))
    ops.gate(rows, ops.put("one", one), "identity", None, to_stream=True)
    ops.go()
    torch.testing.assert_close(ops.view(by_element), x * F.silu(gate))
    torch.testing.assert_close(ops.view(by_row), x * one.sigmoid())
    torch.testing.assert_close(ops.view(ops._stream), 1 + x * one)


@pytest.mark.parametrize("norm_first", [False, True])
def test_gated_norms_of_groups(native_pool: Pool, norm_first: bool) -> None:
    x, gate, weight = torch.randn(ROWS, 96), torch.randn(ROWS, 96), torch.randn(24)
    ops = Ops(native_pool)
    norm = GatedNormWeights(weight, 24, 1e-5, norm_first)
    out = ops.gated_norm(ops.put("x", x), ops.put("gate", gate), norm, "out")
    ops.go()
    want = gated_rms_norm(
        x.double(),
        gate.double(),
        weight.repeat(4),
        1e-5,
        group_size=24,
        norm_before_gate=norm_first,
    )
    torch.testing.assert_close(ops.view(out), want.float(), rtol=1e-5, atol=1e-6)


def test_scales_of_positions(native_pool: Pool) -> None:
    ops = Ops(native_pool)
    out = ops.position_scale(0.3, 1.0, 8.0)
    ops.positions[:] = np.array([0, 6, 7, 100, 5000])
    ops.go()
    steps = ((torch.from_numpy(ops.positions).double() + 1) / 8).floor()
    want = 1 + 0.3 * steps.log1p()
    torch.testing.assert_close(ops.view(out), want[:, None].float())


def test_an_unknown_activation_is_not_recorded() -> None:
    pool: Any = None
    ops = PointwiseOps(torch.float32, ROWS, ROWS, pool)
    with pytest.raises(RecordingError, match="mish"):
        ops.pointwise(Rows(0, F32, 8, 8), "mish", None)
