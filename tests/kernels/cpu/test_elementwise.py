"""Native ops on single rows equal their formulas in float64, at every level."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jubako.kernels.cpu import elementwise as ew
from jubako.kernels.cpu.kernels import CpuKernels
from jubako.kernels.cpu.library import BF16, F32, Pool
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.reference.norm import qk_norm_rope

from ..paging import make_metadata

DTYPES = [torch.float32, torch.bfloat16]
NUMBERS = {torch.float32: F32, torch.bfloat16: BF16}
ROWS = [0, 1, 3, 37]
SIZES = [8, 64, 645]


def close(got: torch.Tensor, want: torch.Tensor, size: float = 1.0) -> None:
    """Equal but for one rounding to the dtype; in float32 for a few."""
    eps = torch.finfo(got.dtype).eps * (0.51 if got.dtype is not torch.float32 else 8)
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= want.abs() * eps + 2e-6 * size).all()


@pytest.fixture
def kernels(native_pool: Pool) -> CpuKernels:
    kernels = CpuKernels()
    kernels.pool = native_pool
    return kernels


def strided(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that do not follow each other, so that a wrong stride shows."""
    return (torch.randn(rows, size + 16) * 3 + 1).to(dtype)[:, 8 : 8 + size]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for rows in ROWS:
        for size in SIZES:
            torch.manual_seed(rows + size)
            x, weight, bias = strided(rows, size, dtype), torch.randn(size), torch.randn(size)
            y = x.double()
            rms = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
            close(kernels.rms_norm(x, weight, 1e-6), rms)
            for own in (None, bias):
                want = F.layer_norm(
                    y, (size,), weight.double(), None if own is None else own.double(), 1e-5
                )
                close(kernels.layer_norm(x, weight, own, 1e-5), want)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(kernels: CpuKernels, dtype: torch.dtype, kind: str) -> None:
    for rows in ROWS:
        for size in (5, 16, 1100):
            x = strided(rows, 2 * size, dtype)
            x[:, :3] = torch.tensor([-1e4, 0.0, 90.0])
            gate, up = x.double().chunk(2, -1)
            act = {
                "silu": F.silu,
                "gelu": F.gelu,
                "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
            }[kind](gate)
            close(getattr(kernels, f"{kind}_and_mul")(x), act * up, 10)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_heads(
    kernels: CpuKernels, dtype: torch.dtype, interleaved: bool, normed: bool
) -> None:
    for size, rotary in ((8, 8), (80, 80), (64, 20), (256, 256)):
        heads = strided(5 * 7, size, dtype).unflatten(0, (5, 7))
        angles = torch.rand(5, 1, rotary // 2) * 100
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        weight = torch.randn(7, size) if normed else None
        want = qk_norm_rope(heads.float(), cos, sin, weight, 1e-6, interleaved)
        got = kernels.qk_norm_rope(heads, cos, sin, weight, 1e-6, interleaved)
        close(got, want.double(), 4)


def test_angles_are_as_torch_computes_them(native_pool: Pool) -> None:
    positions = torch.tensor([0, 1, 2, 77, 4096, 131_071, 1_000_000])
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 26, 2) / 26)
    cos, sin = torch.zeros(7, 16), torch.zeros(7, 16)
    count = ctypes.c_int64(7)
    native_pool.run(
        ew.OP_ROTATION,
        ew.RotationArgs(
            rows=ctypes.addressof(count),
            positions=positions.data_ptr(),
            frequencies=frequencies.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            size=13,
            ld_table=16,
            factor=0.5,
        ),
    )
    angles = (positions.float()[:, None] * frequencies).double()
    assert (cos[:, :13] - 0.5 * angles.cos()).abs().max() < 4e-8
    assert (sin[:, :13] - 0.5 * angles.sin()).abs().max() < 4e-8
    assert not cos[:, 13:].any(), "beyond the row"


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_reach_their_slots_only(kernels: CpuKernels, dtype: torch.dtype) -> None:
    metadata = make_metadata([3, 1], [3, 6], [[4], [2, 5]], 4)
    assert metadata.slot_mapping_cpu is None
    metadata.slot_mapping_cpu = slots = metadata.slot_mapping.numpy()
    slots[1] = -1
    raw = torch.full((6, 3 * 2 * 2 * 4 * 10 * dtype.itemsize), 7, dtype=torch.int8)
    kv = PagedKV.from_raw(raw, num_kv_heads=2, block_size=4, head_size=10, dtype=dtype)
    before = kv.pages.clone()
    # One row more than there are slots: padding.
    key, value = (torch.randn(5, 2, 12).to(dtype)[..., 1:11] for _ in range(2))
    kernels.reshape_and_cache(key, value, kv, metadata)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before[slot // 4, :, 0, slot % 4] = key[token]
            before[slot // 4, :, 1, slot % 4] = value[token]
    assert torch.equal(kv.pages, before)


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_addition_with_norms_on_both_sides(native_pool: Pool, kind: str, post: bool) -> None:
    rows, size = 5, 100
    delta, stream = torch.randn(rows, 112), torch.randn(rows, 128)
    weights = [torch.randn(size) for _ in range(4)]
    y = torch.zeros(rows, 104, dtype=torch.bfloat16)
    count = ctypes.c_int64(rows)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if kind == "layer":
            return F.layer_norm(x, (size,), weight.double(), bias.double(), 1e-5)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    added = delta[:, :size].double()
    if post:
        added = norm(added, weights[0], weights[1])
    want = stream[:, :size].double() + 0.5 * added
    rest = stream[:, size:].clone()
    args = ew.AddNormArgs(
        rows=ctypes.addressof(count),
        delta=delta.data_ptr(),
        stream=stream.data_ptr(),
        y=y.data_ptr(),
        weight=weights[2].data_ptr(),
        size=size,
        ld_delta=112,
        ld_stream=128,
        ldy=104,
        y_dtype=BF16,
        kind=int(kind == "layer"),
        eps=1e-5,
        scale=0.5,
    )
    if post:
        args.post_weight = weights[0].data_ptr()
    if kind == "layer":
        args.bias = weights[3].data_ptr()
        args.post_bias = weights[1].data_ptr() if post else None
    native_pool.run(ew.OP_ADD_NORM, args)
    close(stream[:, :size], want, 2)
    assert torch.equal(stream[:, size:], rest)
    close(y[:, :size], norm(want, weights[2], weights[3]), 4)
    assert not y[:, size:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_of_chosen_rows(native_pool: Pool, dtype: torch.dtype) -> None:
    x, index = torch.randn(6, 40), np.array([5, 0, 5], dtype=np.int64)
    y = torch.zeros(4, 40, dtype=dtype)
    count = ctypes.c_int64(3)
    args = ew.ConvertArgs(
        rows=ctypes.addressof(count),
        index=index.ctypes.data,
        x=x.data_ptr(),
        y=y.data_ptr(),
        size=33,
        ldx=40,
        ldy=40,
        y_dtype=NUMBERS[dtype],
        scale=2.0,
    )
    native_pool.run(ew.OP_CONVERT, args)
    assert torch.equal(y[:3, :33], (x[index, :33] * 2).to(dtype))
    assert not y[3].any()
    assert not y[:, 33:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1.00390625, 1.01171875])
def test_rounding_of_special_values(native_pool: Pool, value: float) -> None:
    """Ties go to the even number; what is no number stays so."""
    x, y = torch.full((1, 17), value), torch.zeros(1, 17, dtype=torch.bfloat16)
    count = ctypes.c_int64(1)
    args = ew.ConvertArgs(
        rows=ctypes.addressof(count),
        x=x.data_ptr(),
        y=y.data_ptr(),
        size=17,
        ldx=17,
        ldy=17,
        y_dtype=BF16,
        scale=1.0,
    )
    native_pool.run(ew.OP_CONVERT, args)
    assert torch.equal(y.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
