"""Native matrix products and packed matrices equal plain arithmetic, at every level."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from jubako.kernels.cpu import packed_matrix
from jubako.kernels.cpu.library import Pool
from jubako.kernels.cpu.matmul import EPILOGUE_ADD, EPILOGUES_MUL
from jubako.kernels.cpu.packed_matrix import GGUF_KINDS, PackedMatrix, Piece
from jubako.models.loader.dequantize import BLOCKS, dequantize
from tests.kernels.cpu.products import product

FLOATS = (torch.float32, torch.bfloat16)
SHAPES = ((96, 64), (70, 45), (1, 1), (33, 320), (130, 416))
"""Outputs and inputs: whole panels, none whole, and rows that end amid a unit."""
ROWS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 70, 300)

EXACT = 3e-6
"""Error, as a part of the largest result, of a sum of float32 products."""


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number; infinite if there is NaN."""
    largest = (ours.double() - exact).abs().max() / exact.abs().max()
    return float(largest.nan_to_num(torch.inf))


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


def blocks_of(kind: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Random blocks [n, bytes a row] of a GGUF type with scales of a usual size."""
    random = torch.Generator().manual_seed(seed)
    elements, num_bytes = BLOCKS[kind]
    blocks = torch.randint(
        0, 256, (n * k // elements, num_bytes), dtype=torch.uint8, generator=random
    )
    two = kind.endswith(("_1", "Q4_K", "Q5_K"))
    for at in (208,) if kind == "Q6_K" else (0, 2) if two else (0,):
        scales = torch.rand(len(blocks), 1, generator=random) * 0.1
        blocks[:, at : at + 2] = scales.half().view(torch.uint8)
    return blocks.view(n, -1)


def values_of(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return dequantize(blocks.view(-1, BLOCKS[kind][1]), kind).view(len(blocks), -1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_of_floats(native_pool: Pool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for n, k in SHAPES:
        weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
        packed = PackedMatrix.from_tensor(weight, native_pool)
        for rows in ROWS:
            x = torch.randn(rows, k).to(dtype)
            exact = exact_product(x, weight)
            assert error(product(native_pool, x, packed), exact) < EXACT, (n, k, rows)
            ours = product(native_pool, x, packed, bias, dtype=dtype)
            rounding = 2**-8 if dtype is torch.bfloat16 else EXACT
            assert error(ours, exact + bias) < rounding, (n, k, rows)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_may_be_apart_and_what_is_between_them_stays(
    native_pool: Pool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 45).to(dtype)
    packed = PackedMatrix.from_tensor(weight, native_pool)
    for rows in (1, 5, 40):
        # What is beside x is no number, and must not get into the products.
        x = torch.full((rows, 80), torch.nan, dtype=dtype)
        x[:, :45] = torch.randn(rows, 45).to(dtype)
        out = torch.full((rows, 100), 7.0)
        product(native_pool, x[:, :45], packed, out=out)
        assert error(out[:, :70], exact_product(x[:, :45], weight)) < EXACT
        assert (out[:, 70:] == 7.0).all()


def test_a_float32_row_is_the_same_in_any_batch(native_pool: Pool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(70, 333), torch.randn(300, 333)
    packed = PackedMatrix.from_tensor(weight, native_pool)
    whole = product(native_pool, x, packed)
    for rows in (1, 2, 5, 12, 13, 40):
        for start in (0, 100):
            part = product(native_pool, x[start : start + rows], packed)
            assert torch.equal(part, whole[start : start + rows])


@pytest.mark.parametrize("kind", ["BF16", "INT8"])
def test_more_rows_than_a_cache_holds(native_pool: Pool, kind: str) -> None:
    """They are worked on in groups; the last block of the last one overlaps the group before."""
    torch.manual_seed(0)
    n, k, rows = 200, 4100, 205
    packed = PackedMatrix.from_tensor(torch.randn(n, k).bfloat16(), native_pool, kind=kind)
    held = packed.rows(torch.arange(n), native_pool)
    x, before = torch.randn(rows, k).bfloat16(), torch.randn(rows, n)
    exact = before + exact_product(x, held)
    ours = product(native_pool, x, packed, epilogue=EPILOGUE_ADD, out=before)
    assert error(ours, exact) < (EXACT if kind == "BF16" else 2e-2)


def test_results_are_added(native_pool: Pool) -> None:
    torch.manual_seed(0)
    for dtype in FLOATS:
        weight, bias = torch.randn(70, 64).to(dtype), torch.randn(70)
        packed = PackedMatrix.from_tensor(weight, native_pool)
        for rows in (1, 33, 40, 289):
            x, before = torch.randn(rows, 64).to(dtype), torch.randn(rows, 70)
            exact = before + bias + exact_product(x, weight)
            ours = product(native_pool, x, packed, bias, epilogue=EPILOGUE_ADD, out=before)
            assert error(ours, exact) < EXACT


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", EPILOGUES_MUL)
def test_gated_activations(native_pool: Pool, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    }
    for size in (40, 16, 3):
        weight, bias = (torch.randn(2 * size, 64) / 8).to(dtype), torch.randn(2 * size)
        packed = PackedMatrix.from_tensor(weight, native_pool, interleaved=True)
        for rows in (1, 7, 33):
            x = torch.randn(rows, 64).to(dtype)
            gate, up = (exact_product(x, weight) + bias).chunk(2, dim=-1)
            ours = product(native_pool, x, packed, bias, epilogue=EPILOGUES_MUL[activation])
            assert error(ours, functions[activation](gate) * up) < 2 * EXACT


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_gguf_blocks_keep_their_numbers(native_pool: Pool, kind: str) -> None:
    n, k = 70, 512
    blocks = blocks_of(kind, n, k)
    packed = PackedMatrix.from_blocks([Piece(blocks, kind)], k, native_pool)
    ids = torch.arange(n).flip(0)
    assert torch.equal(packed.rows(ids, native_pool), values_of(blocks, kind)[ids])
    panels = -(-n // 32) * 32
    assert packed.num_bytes <= -(-blocks.shape[1] * panels // 4096) * 4096


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_products_of_gguf_blocks(native_pool: Pool, kind: str) -> None:
    torch.manual_seed(0)
    n, k = 70, 512
    blocks = blocks_of(kind, n, k)
    weight = values_of(blocks, kind)
    packed = PackedMatrix.from_blocks([Piece(blocks, kind)], k, native_pool)
    for rows in (1, 2, 3, 4, 5, 16, 20, 33, 70):
        x = torch.randn(rows, k)
        assert error(product(native_pool, x, packed), exact_product(x, weight)) < EXACT
        x = x.bfloat16()
        ours = error(product(native_pool, x, packed), exact_product(x, weight))
        # As if weights were rounded to bfloat16, but for a few rows of which x is, to 16 bits.
        assert ours < 4e-3
        if rows < 4:
            assert ours < 1e-4


def test_parts_of_several_kinds(native_pool: Pool) -> None:
    torch.manual_seed(0)
    k = 256
    sizes = {"Q5_0": (64, 70), "Q8_0": (33,), "Q4_K": (20,)}
    pieces = [
        Piece(blocks_of(kind, n, k, seed=n), kind) for kind, all_n in sizes.items() for n in all_n
    ]
    packed = PackedMatrix.from_blocks(pieces, k, native_pool)
    assert packed.kinds == ("Q5_0", "Q8_0", "Q4_K")
    weight = torch.cat([values_of(piece.data, str(piece.type)) for piece in pieces])
    bias = torch.randn(packed.n)
    for rows in (1, 6, 40):
        x = torch.randn(rows, k).bfloat16()
        exact = exact_product(x, weight) + bias
        assert error(product(native_pool, x, packed, bias), exact) < 4e-3


def test_gguf_gate_and_up(native_pool: Pool) -> None:
    torch.manual_seed(0)
    halves = [Piece(blocks_of("Q5_0", 40, 64, seed), "Q5_0") for seed in (1, 2)]
    packed = PackedMatrix.from_blocks(halves, 64, native_pool, interleaved=True)
    x = torch.randn(9, 64)
    gate, up = (exact_product(x, values_of(half.data, "Q5_0")) for half in halves)
    ours = product(native_pool, x, packed, epilogue=EPILOGUES_MUL["silu"])
    assert error(ours, F.silu(gate) * up) < 2 * EXACT


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 2e-2), (16, 1e-4)])
def test_products_of_int8(native_pool: Pool, bits: int, tolerance: float) -> None:
    torch.manual_seed(0)
    n, k = 70, 500
    weight = torch.randn(n, k)
    packed = PackedMatrix.from_tensor(weight, native_pool, kind="INT8")
    held = packed.rows(torch.arange(n), native_pool)
    # Half a step of a 127th of the row's largest.
    assert ((held - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()
    for rows in (1, 2, 3, 4, 5, 20, 33, 70, 300):
        x = torch.randn(rows, k)
        assert error(product(native_pool, x, packed), exact_product(x, held)) < EXACT
        x = x.bfloat16()
        ours = product(native_pool, x, packed, activation_bits=bits)
        assert error(ours, exact_product(x, held)) < tolerance


@pytest.mark.parametrize(("kind", "tolerance"), [("Q8_0", 0.008), ("Q4_0", 0.1), ("Q4_1", 0.09)])
def test_floats_quantised_in_groups(native_pool: Pool, kind: str, tolerance: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 256)
    weight[3] = 0
    packed = PackedMatrix.from_tensor(weight, native_pool, kind=kind)
    held = packed.rows(torch.arange(70), native_pool)
    assert (held[3] == 0).all()
    assert float((held - weight).pow(2).mean().sqrt()) < tolerance


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "INT8"])
def test_not_a_number_stays_one_and_in_its_row(native_pool: Pool, kind: str) -> None:
    torch.manual_seed(0)
    packed = PackedMatrix.from_tensor(torch.randn(64, 64), native_pool, kind=kind)
    for rows in (2, 8, 40):
        x = torch.randn(rows, 64).to(torch.float32 if kind == "F32" else torch.bfloat16)
        x[1, 5] = torch.nan
        ours = product(native_pool, x, packed)
        assert ours[1].isnan().all()
        others = torch.cat((ours[:1], ours[2:]))
        assert others.isfinite().all()


def test_rows_of_zeros_and_tiny_numbers(native_pool: Pool) -> None:
    for kind in ("BF16", "Q8_0", "INT8"):
        packed = PackedMatrix.from_tensor(torch.randn(32, 64), native_pool, kind=kind)
        for rows in (1, 8):
            x = torch.zeros(rows, 64, dtype=torch.bfloat16)
            assert (product(native_pool, x, packed) == 0).all()
            x += 1e-38
            assert product(native_pool, x, packed).isfinite().all()


def test_no_rows(native_pool: Pool) -> None:
    packed = PackedMatrix.from_tensor(torch.randn(32, 64), native_pool)
    assert product(native_pool, torch.zeros(0, 64), packed).shape == (0, 32)


def test_pieces_that_end_amid_panels(native_pool: Pool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(100, 64).bfloat16()
    packed = PackedMatrix(("BF16",), (100,), 64)
    for start, end in ((0, 5), (5, 37), (37, 100)):
        packed.put(native_pool, 0, start, Piece(weight[start:end]))
    assert torch.equal(packed.rows(torch.arange(100), native_pool), weight.float())


def test_what_cannot_be_packed_says_so(native_pool: Pool) -> None:
    with pytest.raises(ValueError, match="Q4_K holds 256 numbers together, and rows have 320"):
        PackedMatrix(("Q4_K",), (32,), 320)
    with pytest.raises(ValueError, match="floats cannot be packed as Q5_0"):
        PackedMatrix.from_tensor(torch.randn(32, 64), native_pool, kind="Q5_0")
    pieces = [Piece(blocks_of(kind, 32, 64), kind) for kind in ("Q5_0", "Q8_0")]
    with pytest.raises(ValueError, match="gate and up cannot be interleaved"):
        PackedMatrix.from_blocks(pieces, 64, native_pool, interleaved=True)
    with pytest.raises(ValueError, match="Q2_K has no packed layout"):
        PackedMatrix.from_blocks([Piece(pieces[0].data, "Q2_K")], 64, native_pool)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["BF16", "Q5_0"])
def test_a_source_that_is_given_back_on_the_way_is_packed_the_same(
    native_pool: Pool, kind: str, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_matrix, "_WORTH_DISCARDING", 0)
    monkeypatch.setattr(packed_matrix, "_DISCARD_BYTES", 1 << 16)
    n, k = 1400, 320

    def pack(consume: bool) -> list[bytes]:
        if kind == "BF16":
            weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).bfloat16()
            packed = PackedMatrix.from_tensor(
                weight, native_pool, interleaved=interleaved, consume=consume
            )
        else:
            weight = blocks_of(kind, n, k)
            halves = [Piece(half, kind) for half in weight.chunk(2)]
            packed = PackedMatrix.from_blocks(
                halves, k, native_pool, interleaved=interleaved, consume=consume
            )
        return [ctypes.string_at(piece.address, piece.num_bytes) for piece in packed.memory]

    assert pack(consume=True) == pack(consume=False)
