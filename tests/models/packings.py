"""How does each format store a quantised matrix? One element after the other.

Each function takes a matrix [n, m] and gives the tensors that stand for it, by what follows the
layer's name, and the float32 matrix that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Matrix = np.ndarray[Any, Any]
Stored = dict[str, torch.Tensor]
Packing = Callable[[Matrix], tuple[Stored, Matrix]]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Numbers:
    """A matrix in unsigned integers: number, zero point and scale of each element."""

    def __init__(self, weight: Matrix, bits: int, group_of: Matrix, symmetric: bool) -> None:
        n, m = weight.shape
        groups = int(group_of.max()) + 1
        top = 2**bits - 1
        self.bits = bits
        self.scales = np.zeros((n, groups), np.float16)
        self.zeros = np.zeros((n, groups), np.int64)
        self.numbers = np.zeros((n, m), np.int64)
        self.values = np.zeros((n, m), np.float32)
        for i in range(n):
            for g in range(groups):
                row = weight[i, group_of == g]
                low, high = min(row.min(), 0), max(row.max(), 0)
                if symmetric:
                    high = max(high, -low)
                    low = -high
                scale = np.float16((high - low) / top)
                zero = (top + 1) // 2 if symmetric else round(float(-low / np.float32(scale)))
                self.scales[i, g] = scale
                self.zeros[i, g] = min(max(zero, 0), top)
            for j in range(m):
                scale = np.float32(self.scales[i, group_of[j]])
                zero = self.zeros[i, group_of[j]]
                number = min(max(round(float(weight[i, j] / scale)) + zero, 0), top)
                self.numbers[i, j] = number
                self.values[i, j] = np.float32(number - zero) * scale


def words(numbers: list[int], bits: int) -> list[int]:
    """Words of 32 bits, as signed integers, the first number in the lowest bits."""
    out = []
    for start in range(0, len(numbers), 32 // bits):
        word = 0
        for place, number in enumerate(numbers[start : start + 32 // bits]):
            assert 0 <= number < 2**bits
            word += int(number) << (bits * place)
        out.append(word - 2**32 if word >= 2**31 else word)
    return out


def by_rows(numbers: Matrix, bits: int) -> Matrix:
    """Each row in words of its own."""
    return np.array([words(list(row), bits) for row in numbers], np.int32)


def tensor(array: Matrix) -> torch.Tensor:
    """In memory of its own, row after row."""
    return torch.from_numpy(np.ascontiguousarray(array).copy())


def groups_of_columns(m: int, size: int | None, shuffled: bool = False) -> Matrix:
    """The group of each column."""
    groups = np.arange(m) // (size or m)
    return np.random.default_rng(5).permutation(groups) if shuffled else groups


def gptq(
    bits: int,
    size: int | None,
    *,
    shuffled: bool = False,
    symmetric: bool = False,
    v2: bool = False,
    with_index: bool = True,
) -> Packing:
    """AutoGPTQ's layout, in which the first version takes 1 from each zero point."""

    def pack(weight: Matrix) -> tuple[Stored, Matrix]:
        group_of = groups_of_columns(weight.shape[1], size, shuffled)
        q = Numbers(weight, bits, group_of, symmetric)
        zeros = by_rows(q.zeros.T, bits)
        if not v2:
            ones = sum(1 << shift for shift in range(0, 32, bits))
            zeros = (zeros.astype(np.int64) - ones).astype(np.uint32).view(np.int32)
        stored = {
            ".qweight": tensor(by_rows(q.numbers, bits).T),
            ".qzeros": tensor(zeros),
            ".scales": tensor(q.scales.T),
        }
        if with_index:
            stored[".g_idx"] = tensor(group_of.astype(np.int32))
        return stored, q.values

    return pack


def awq(size: int | None) -> Packing:
    """AutoAWQ's GEMM layout."""

    def interleaved(numbers: Matrix) -> Matrix:
        rows = []
        for row in numbers:
            order = [row[start + k] for start in range(0, len(row), 8) for k in AWQ_ORDER]
            rows.append(words(order, 4))
        return np.array(rows, np.int32)

    def pack(weight: Matrix) -> tuple[Stored, Matrix]:
        q = Numbers(weight, 4, groups_of_columns(weight.shape[1], size), symmetric=False)
        stored = {
            ".qweight": tensor(interleaved(q.numbers.T)),
            ".qzeros": tensor(interleaved(q.zeros.T)),
            ".scales": tensor(q.scales.T),
        }
        return stored, q.values

    return pack


def pack_quantized(
    bits: int,
    size: int | None,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
    packed_zeros: bool = True,
) -> Packing:
    """compressed-tensors' packed layout: signed numbers with half the range added."""

    def pack(weight: Matrix) -> tuple[Stored, Matrix]:
        n, m = weight.shape
        group_of = groups_of_columns(m, size, shuffled)
        q = Numbers(weight, bits, group_of, symmetric)
        stored = {
            ".weight_packed": tensor(by_rows(q.numbers, bits)),
            ".weight_scale": tensor(q.scales),
            ".weight_shape": torch.tensor([n, m]),
        }
        if not symmetric and packed_zeros:
            stored[".weight_zero_point"] = tensor(by_rows(q.zeros.T, bits).T)
        elif not symmetric:
            signed = q.zeros - 2 ** (bits - 1)
            stored[".weight_zero_point"] = tensor(signed.astype(np.int8))
        if shuffled:
            stored[".weight_g_idx"] = tensor(group_of.astype(np.int32))
        return stored, q.values

    return pack


def int8(size: int | None = None, *, symmetric: bool = True) -> Packing:
    """compressed-tensors' int8 layout."""

    def pack(weight: Matrix) -> tuple[Stored, Matrix]:
        q = Numbers(weight, 8, groups_of_columns(weight.shape[1], size), symmetric)
        stored = {
            ".weight": tensor((q.numbers - 128).astype(np.int8)),
            ".weight_scale": tensor(q.scales),
        }
        if not symmetric:
            stored[".weight_zero_point"] = tensor((q.zeros - 128).astype(np.int8))
        return stored, q.values

    return pack


def int8_for_all(weight: Matrix) -> tuple[Stored, Matrix]:
    """One scale for the whole matrix."""
    scale = np.float32(np.abs(weight).max() / 127)
    numbers = np.round(weight / scale).astype(np.int8)
    stored = {".weight": tensor(numbers), ".weight_scale": torch.tensor([scale])}
    return stored, numbers.astype(np.float32) * scale


def fp8(rows: bool) -> Packing:
    """8-bit floats with a scale for each row, or for all."""

    def pack(weight: Matrix) -> tuple[Stored, Matrix]:
        matrix = torch.from_numpy(weight)
        scales = matrix.abs().amax(1, keepdim=True) / 448
        if not rows:
            scales = scales.max().reshape(1)
        stored = (matrix / scales).to(torch.float8_e4m3fn)
        return {".weight": stored, ".weight_scale": scales}, (stored.float() * scales).numpy()

    return pack


def fp8_blocks(block: tuple[int, int]) -> Packing:
    """8-bit floats with a scale for each block of rows and columns."""

    def pack(weight: Matrix) -> tuple[Stored, Matrix]:
        n, m = weight.shape
        scales = np.zeros((-(-n // block[0]), -(-m // block[1])), np.float32)
        by_element = np.zeros((n, m), np.float32)
        for i in range(n):
            for j in range(m):
                a, b = i // block[0], j // block[1]
                if not scales[a, b]:
                    rows, columns = (slice(k * s, (k + 1) * s) for k, s in zip((a, b), block))
                    scales[a, b] = np.abs(weight[rows, columns]).max() / 448
                by_element[i, j] = scales[a, b]
        stored = torch.from_numpy(weight / by_element).to(torch.float8_e4m3fn)
        values = stored.float().numpy() * by_element
        return {".weight": stored, ".weight_scale": tensor(scales)}, values

    return pack
