"""How fast are the native matrix products, against reading the same memory?

    python benchmarks/matmul_kernels.py [--kinds BF16 INT8 ...] [--rows 1 8 ...] [--threads N]

The matrices are those of 18 layers of a model of hidden size 640 and its head of 262,144 tokens,
each with numbers of its own, so that they come from memory in every pass. Passes of all kinds of
work take turns; each figure is the fastest of many, as other programs disturb the slower ones. With
one thread its processor time counts, which leaves other programs out but for the memory they use.
GB/s counts the bytes of the weights once a pass.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from jubako.kernels.cpu import library
from jubako.kernels.cpu.head import OP_HEAD_GREEDY, HeadGreedyArgs, head_scratch_bytes
from jubako.kernels.cpu.matmul import (
    EPILOGUE_NONE,
    EPILOGUES_MUL,
    OP_MATMUL,
    OP_READ,
    MatmulArgs,
    ReadArgs,
    matmul_scratch_bytes,
)
from jubako.kernels.cpu.packed_matrix import FROM_FLOATS, PackedMatrix, Piece

LAYERS = 18
SHAPES = ((1536, 640, False), (640, 1024, False), (4096, 640, True), (640, 2048, False))
"""Outputs, inputs, whether gate and up are interleaved."""
HEAD = (262144, 640)
DTYPES = {torch.float32: library.F32, torch.bfloat16: library.BF16}


def random_matrix(
    n: int, k: int, kind: str, pool: library.Pool, interleaved: bool = False
) -> PackedMatrix:
    """A matrix of that kind with small random numbers."""
    if kind in FROM_FLOATS:
        weight = torch.randn(n, k) * 0.02
        if kind != "F32":
            weight = weight.bfloat16()
        return PackedMatrix.from_tensor(weight, pool, interleaved=interleaved, kind=kind)
    from jubako.models.loader.dequantize import BLOCKS

    elements, num_bytes = BLOCKS[kind]
    blocks = torch.randint(0, 256, (n * k // elements, num_bytes), dtype=torch.uint8)
    small = torch.full((len(blocks), 1), 0.001, dtype=torch.float16).view(torch.uint8)
    for at in (208,) if kind == "Q6_K" else (0,) if kind == "Q5_0" else (0, 2):
        blocks[:, at : at + 2] = small
    pieces = [Piece(part, kind) for part in blocks.view(n, -1).chunk(2 if interleaved else 1)]
    return PackedMatrix.from_blocks(pieces, k, pool, interleaved=interleaved)


class Work:
    """Ops of one pass, its bytes and floating-point operations, and its fastest time."""

    def __init__(self, name: str, rows: int, num_bytes: int, weights: int) -> None:
        self.name = name
        self.rows = rows
        self.num_bytes = num_bytes
        self.flop = 2 * weights * rows
        self.seconds = float("inf")
        self.keep: list[Any] = []
        self.ops: list[tuple[int, ctypes.Structure]] = []
        self.run: Callable[[], None]

    def close(self, pool: library.Pool) -> None:
        """No more ops come."""
        program = library.program_array(self.ops)
        count = len(self.ops)
        self.run = lambda: pool.run_program(program, count)

    def line(self, read: float) -> str:
        """Its figures, `read` being the read loop's bytes a second."""
        rate = self.num_bytes / self.seconds
        return (
            f"{self.name:22} {self.rows:5d} {self.seconds * 1e3:9.2f} ms {rate / 1e9:7.1f} GB/s"
            f" {rate / read * 100:5.0f} %  {self.flop / self.seconds / 1e12:6.2f} TFLOP/s"
        )


def aligned(num_bytes: int) -> tuple[Any, int]:
    """Memory and its address."""
    memory = library.Memory(num_bytes)
    return memory, memory.address


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """A copy on huge pages, as a program's buffers are; rows an odd number of lines apart."""
    lines = -(-values.shape[1] * values.element_size() // 64) | 1
    stride = lines * 64 // values.element_size()
    memory = library.Memory(values.shape[0] * lines * 64)
    flat = torch.frombuffer(memory.buffer(), dtype=values.dtype)
    out = flat[: values.shape[0] * stride].view(-1, stride)[:, : values.shape[1]]
    return out.copy_(values)


def layers_work(
    kind: str, matrices: list[PackedMatrix], rows: int, dtype: torch.dtype, bits: int, threads: int
) -> Work:
    """The products of all layers."""
    num_bytes = sum(matrix.num_bytes for matrix in matrices)
    work = Work(f"{kind} layers", rows, num_bytes, sum(m.n * m.k for m in matrices))
    count = ctypes.c_int64(rows)
    scratch_bytes = matmul_scratch_bytes(threads, rows, 2048)
    scratch, scratch_at = aligned(scratch_bytes)
    ys = {
        n: rows_of(torch.zeros(rows, n // 2 if gated else n, dtype=dtype)) for n, _, gated in SHAPES
    }
    xs = {k: rows_of(torch.randn(rows, k).to(dtype)) for _, k, _ in SHAPES}
    work.keep = [count, scratch, ys, xs]
    for matrix in matrices:
        x, y = xs[matrix.k], ys[matrix.n]
        args = MatmulArgs(
            rows=ctypes.addressof(count),
            x=x.data_ptr(),
            ldx=x.stride(0),
            w=matrix.address,
            y=y.data_ptr(),
            ldy=y.stride(0),
            scratch=scratch_at,
            scratch_bytes=scratch_bytes,
            parts=matrix.parts,
            x_dtype=DTYPES[dtype],
            y_dtype=DTYPES[dtype],
            epilogue=EPILOGUES_MUL["gelu_tanh"] if matrix.interleaved else EPILOGUE_NONE,
            activation_bits=bits,
        )
        work.ops.append((OP_MATMUL, args))
    return work


def head_work(
    kind: str, matrix: PackedMatrix, rows: int, dtype: torch.dtype, bits: int, threads: int
) -> Work:
    """The head with the choice of the best token."""
    work = Work(f"{kind} greedy head", rows, matrix.num_bytes, matrix.n * matrix.k)
    count = ctypes.c_int64(rows)
    scratch_bytes = head_scratch_bytes(threads, rows, matrix.k)
    scratch, scratch_at = aligned(scratch_bytes)
    ids = torch.empty(rows, dtype=torch.int64)
    x = rows_of(torch.randn(rows, matrix.k).to(dtype))
    work.keep = [count, scratch, ids, x]
    args = HeadGreedyArgs(
        rows=ctypes.addressof(count),
        x=x.data_ptr(),
        ldx=x.stride(0),
        w=matrix.address,
        ids=ids.data_ptr(),
        scratch=scratch_at,
        scratch_bytes=scratch_bytes,
        x_dtype=DTYPES[dtype],
        round_dtype=library.BF16,
        activation_bits=bits,
    )
    work.ops.append((OP_HEAD_GREEDY, args))
    return work


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["BF16", "INT8", "Q8_0", "Q5_0", "Q4_0"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 32, 256])
    parser.add_argument("--head-rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activation-bits", type=int, default=8)
    parser.add_argument("--no-head", action="store_true")
    parser.add_argument("--no-layers", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool = library.pool(options.threads)
    common = (options.activation_bits, options.threads)
    works: list[Work] = []
    for kind in options.kinds:
        dtype = torch.float32 if kind == "F32" else torch.bfloat16
        if not options.no_layers:
            matrices = [
                random_matrix(n, k, kind, pool, interleaved)
                for _ in range(LAYERS)
                for n, k, interleaved in SHAPES
                if not (kind.endswith("_K") and k % 256)
            ]
            works += [layers_work(kind, matrices, rows, dtype, *common) for rows in options.rows]
        if not options.no_head and not kind.endswith("_K"):
            head = random_matrix(*HEAD, kind, pool)
            works += [head_work(kind, head, rows, dtype, *common) for rows in options.head_rows]
            works[-1].keep.append(head)
        if not options.no_layers:
            works[-1].keep.append(matrices)
    read_bytes = 256 << 20
    memory, address = aligned(read_bytes)
    ctypes.memset(address, 1, read_bytes)
    sums = torch.zeros(options.threads * 16, dtype=torch.int32)
    read = Work("read", 0, read_bytes, 0)
    read.keep = [memory, sums]
    read.ops.append((OP_READ, ReadArgs(data=address, bytes=read_bytes, sums=sums.data_ptr())))
    works.append(read)
    for work in works:
        work.close(pool)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        for work in works:
            for _ in range(2):
                start = clock()
                work.run()
                work.seconds = min(work.seconds, clock() - start)
    rate = read.num_bytes / read.seconds
    print(f"level {library.isa_level()}, {options.threads} threads, read {rate / 1e9:.1f} GB/s")
    print(f"{'work':22} {'rows':>5} {'time':>12} {'weights':>12} {'of read':>7}")
    for work in works[:-1]:
        print(work.line(rate))


if __name__ == "__main__":
    main()
