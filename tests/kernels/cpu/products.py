"""Runs the ops on packed matrices once, with arguments as tensors."""

from __future__ import annotations

import ctypes

import torch

from jubako.kernels.cpu.head import OP_HEAD_GREEDY, HeadGreedyArgs, head_scratch_bytes
from jubako.kernels.cpu.library import BF16, F32, Memory, Pool
from jubako.kernels.cpu.matmul import EPILOGUE_NONE, OP_MATMUL, MatmulArgs, matmul_scratch_bytes
from jubako.kernels.cpu.packed_matrix import PackedMatrix

DTYPES = {torch.float32: F32, torch.bfloat16: BF16}


def product(
    pool: Pool,
    x: torch.Tensor,
    matrix: PackedMatrix,
    bias: torch.Tensor | None = None,
    *,
    epilogue: int = EPILOGUE_NONE,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    activation_bits: int = 8,
) -> torch.Tensor:
    """`x @ matrix.T` with what follows it, into `out` or a new tensor of NaN."""
    rows, k = x.shape
    columns = matrix.n // 2 if matrix.interleaved else matrix.n
    if out is None:
        out = torch.full((rows, columns), torch.nan, dtype=dtype)
    scratch = Memory(matmul_scratch_bytes(pool.num_threads, rows, k))
    ctypes.memset(scratch.address, 0xFF, scratch.num_bytes)
    count = ctypes.c_int64(rows)
    args = MatmulArgs(
        rows=ctypes.addressof(count),
        x=x.data_ptr(),
        ldx=x.stride(0),
        w=matrix.address,
        bias=None if bias is None else bias.data_ptr(),
        y=out.data_ptr(),
        ldy=out.stride(0),
        scratch=scratch.address,
        scratch_bytes=scratch.num_bytes,
        parts=matrix.parts,
        x_dtype=DTYPES[x.dtype],
        y_dtype=DTYPES[out.dtype],
        epilogue=epilogue,
        activation_bits=activation_bits,
    )
    pool.run(OP_MATMUL, args)
    return out


def greedy(
    pool: Pool,
    x: torch.Tensor,
    matrix: PackedMatrix,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [rows] and values [rows] of the best logits, rounded to `dtype`."""
    rows, k = x.shape
    ids = torch.full((rows,), -1, dtype=torch.int64)
    values = torch.full((rows,), torch.nan)
    scratch = Memory(head_scratch_bytes(pool.num_threads, rows, k))
    ctypes.memset(scratch.address, 0xFF, scratch.num_bytes)
    count = ctypes.c_int64(rows)
    args = HeadGreedyArgs(
        rows=ctypes.addressof(count),
        x=x.data_ptr(),
        ldx=x.stride(0),
        w=matrix.address,
        bias=None if bias is None else bias.data_ptr(),
        ids=ids.data_ptr(),
        values=values.data_ptr(),
        scratch=scratch.address,
        scratch_bytes=scratch.num_bytes,
        x_dtype=DTYPES[x.dtype],
        round_dtype=DTYPES[dtype],
        activation_bits=8,
    )
    pool.run(OP_HEAD_GREEDY, args)
    return ids, values
