"""Norms, rotations, activations and products equal their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from jubako.errors import ConfigError
from jubako.kernels import registry
from jubako.kernels.reference.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from jubako.kernels.reference.linear import linear
from jubako.kernels.reference.norm import BLOCK_ELEMENTS, layer_norm, qk_norm_rope, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 3, 2 * (BLOCK_ELEMENTS // 64) + 5]


def rounding(dtype: torch.dtype) -> float:
    """A little more than half a unit in the last place, relative."""
    return torch.finfo(dtype).eps * (0.51 if dtype is not torch.float32 else 8)


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_once(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(tokens, 64) * 3).to(dtype)
    weight = 1 + torch.randn(64)
    before = x.clone()
    got = rms_norm(x, weight, 1e-6)
    want = norm64(x, weight, 1e-6)
    assert got.dtype is dtype
    assert torch.equal(x, before)
    assert ((got.double() - want).abs() <= want.abs() * rounding(dtype) + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_zeros_is_zero(dtype: torch.dtype) -> None:
    assert not rms_norm(torch.zeros(2, 8, dtype=dtype), torch.ones(8), 1e-6).any()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_rounds_once(dtype: torch.dtype, tokens: int, biased: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(tokens, 64) * 3 + 2).to(dtype)
    weight, bias = 1 + torch.randn(64), torch.randn(64) if biased else None
    before = x.clone()
    got = layer_norm(x, weight, bias, 1e-5)
    y = x.double() - x.double().mean(-1, keepdim=True)
    want = norm64(y, weight, 1e-5) + (0 if bias is None else bias.double())
    assert got.dtype is dtype
    assert torch.equal(x, before)
    assert ((got.double() - want).abs() <= want.abs() * rounding(dtype) + 4e-6).all()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [16, 12])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm_rope_turns_pairs(
    dtype: torch.dtype, tokens: int, normed: bool, turned: int, interleaved: bool
) -> None:
    torch.manual_seed(0)
    heads, size = 3, 16
    qkv = torch.randn(tokens, heads + 2, size).to(dtype)
    qk = qkv[:, :heads]
    angles = torch.rand(tokens, turned // 2) * 7
    weight = torch.rand(heads, size) + 0.5 if normed else None
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    before = qkv.clone()

    got = qk_norm_rope(qk, cos, sin, weight, 1e-6, interleaved)

    x = norm64(qk, weight, 1e-6) if weight is not None else qk.double()
    first = torch.arange(turned // 2) * (2 if interleaved else 1)
    second = first + (1 if interleaved else turned // 2)
    pairs = torch.complex(x[..., first], x[..., second])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)[:, None]
    want = x.clone()
    want[..., first], want[..., second] = pairs.real, pairs.imag
    assert got.dtype is dtype
    assert torch.equal(qkv, before)
    assert ((got.double() - want).abs() <= want.abs() * rounding(dtype) + 3e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "formula"),
    [
        (silu_and_mul, lambda x: x / (1 + torch.exp(-x))),
        (gelu_and_mul, lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        (
            gelu_tanh_and_mul,
            lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        ),
    ],
    ids=["silu", "gelu", "gelu_tanh"],
)
def test_gated_activations(kernel, formula, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(7, 40) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    want = formula(gate) * up
    got = kernel(gate_up.clone())
    assert got.dtype is dtype
    assert ((got.double() - want).abs() <= want.abs() * 4 * rounding(dtype) + 1e-5).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(tokens, 96).to(dtype), torch.randn(40, 96).to(dtype)
    b = torch.randn(40).to(dtype) if bias else None
    want = F.linear(x.double(), w.double(), None if b is None else b.double())
    got = linear(x, w, b)
    assert got.dtype is dtype
    assert got.shape == (tokens, 40)
    assert ((got.double() - want).abs() <= 40 * 2 * rounding(dtype)).all()


class TestRegistry:
    def test_reference_is_always_there(self) -> None:
        assert "reference" in registry.available()
        assert registry.set_kernels("reference").name == "reference"
        assert registry.get_kernels() is registry.set_kernels("reference")

    def test_auto_is_the_best(self) -> None:
        assert registry.set_kernels("auto").name == registry.available()[0]

    def test_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match=r"'magic' is not available.*reference"):
            registry.set_kernels("magic")
