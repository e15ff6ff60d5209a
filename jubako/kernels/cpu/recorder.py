"""How do the ops of a program come about, and where do their results lie?

What has its own state between steps (attention, recurrent layers) is recorded by the classes that
are made of this one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from jubako.kernels.cpu import elementwise as ew
from jubako.kernels.cpu.experts import (
    MAX_EXPERTS,
    OP_EXPERTS,
    OP_ROUTE,
    PackedExperts,
    experts_args,
    route_args,
)
from jubako.kernels.cpu.library import F32, Memory, Pool
from jubako.kernels.cpu.matmul import (
    EPILOGUE_ADD,
    EPILOGUE_NONE,
    EPILOGUES_MUL,
    OP_EMBED,
    OP_MATMUL,
    EmbedArgs,
    MatmulArgs,
    matmul_scratch_bytes,
)
from jubako.kernels.cpu.packed_matrix import PackedMatrix
from jubako.kernels.cpu.recording import (
    ExpertChoice,
    ExpertRules,
    NativeRotation,
    NormWeights,
    RecordingError,
    Rows,
)
from jubako.kernels.cpu.tensors import DTYPES, address, pointer


class Recorder:
    """Ops on rows of a step, in buffers that they share.

    `dtype` is the model's, of what enters a matrix product; what is added up is float32.
    """

    def __init__(self, dtype: torch.dtype, max_tokens: int, max_reqs: int, pool: Pool) -> None:
        if dtype not in DTYPES:
            raise RecordingError(str(dtype))
        self.dtype = DTYPES[dtype]
        self.torch_dtype = dtype
        self.max_tokens = max_tokens
        self._max_reqs = max_reqs
        self._pool = pool
        self._ops: list[tuple[int, ctypes.Structure]] = []
        self._keep: list[Any] = []
        self._buffers: dict[tuple[str, int, int], tuple[Rows, Memory]] = {}
        self._matmuls: list[tuple[Any, int]] = []
        self._open: ew.AddNormArgs | None = None
        self._stream: Rows | None = None

        self._counts = (ctypes.c_int64 * 2)()
        self._tokens = ctypes.addressof(self._counts)
        self._out_rows = self._tokens + 8
        self.input_ids = np.zeros(max_tokens, np.int32)
        self.positions = np.zeros(max_tokens, np.int64)

    def buffer(self, role: str, width: int, dtype: int) -> Rows:
        """Rows for one purpose; layers use the same ones after each other."""
        key = (role, width, dtype)
        if key not in self._buffers:
            size = 4 if dtype == F32 else 2
            # An odd number of cache lines: rows do not all fall into the same sets.
            lines = -(-width * size // 64) | 1
            memory = Memory(self.max_tokens * lines * 64)
            rows = Rows(memory.address, dtype, width, lines * 64 // size)
            self._buffers[key] = (rows, memory)
        return self._buffers[key][0]

    def embed(self, table: PackedMatrix, scale: float) -> None:
        """Begin the stream with the vectors of the step's token ids."""
        self._stream = self.buffer("stream", table.k, F32)
        self._op(
            OP_EMBED,
            EmbedArgs(
                rows=self._tokens,
                ids=address(self.input_ids),
                w=table.address,
                y=self._stream.address,
                ldy=self._stream.stride,
                scale=scale,
                ids_bits=32,
                y_dtype=F32,
            ),
            table,
        )

    def rotation(self, frequencies: torch.Tensor, factor: float) -> NativeRotation:
        """The step's cosines and sines of angles per position [R / 2] float32."""
        size = len(frequencies)
        tables = [self.buffer(f"{kind}{len(self._ops)}", size, F32) for kind in ("cos", "sin")]
        self._op(
            ew.OP_ROTATION,
            ew.RotationArgs(
                rows=self._tokens,
                positions=address(self.positions),
                frequencies=frequencies.data_ptr(),
                cos=tables[0].address,
                sin=tables[1].address,
                size=size,
                ld_table=tables[0].stride,
                factor=factor,
            ),
            frequencies,
        )
        return NativeRotation(tables[0].address, tables[1].address, tables[0].stride, 2 * size)

    def add(self, delta: Rows, norm: NormWeights | None = None, scale: float = 1.0) -> None:
        """Add `scale · norm(delta)` to the stream."""
        stream = self._the_stream()
        args = ew.AddNormArgs(
            rows=self._tokens,
            delta=delta.address,
            delta_dtype=delta.dtype,
            ld_delta=delta.stride,
            stream=stream.address,
            ld_stream=stream.stride,
            size=stream.width,
            scale=scale,
        )
        if norm is not None:
            args.post_weight, args.post_bias = pointer(norm.weight), pointer(norm.bias)
            args.kind, args.eps = norm.kind, norm.eps
        self._op(ew.OP_ADD_NORM, args, norm)
        self._open = args

    def normed(self, norm: NormWeights) -> Rows:
        """The stream, normalised, in the model's dtype."""
        stream = self._the_stream()
        out = self.buffer("x", stream.width, self.dtype)
        joined, self._open = self._open, None
        if joined is not None and (
            not joined.post_weight or (joined.kind, joined.eps) == (norm.kind, norm.eps)
        ):
            joined.weight, joined.bias = pointer(norm.weight), pointer(norm.bias)
            joined.kind, joined.eps = norm.kind, norm.eps
            joined.y, joined.ldy, joined.y_dtype = out.address, out.stride, out.dtype
            self._keep.append(norm)
            return out
        self._norm(stream, norm, out, None)
        return out

    def raw(self) -> Rows:
        """The stream, rounded to the model's dtype."""
        stream = self._the_stream()
        self._open = None
        out = self.buffer("x", stream.width, self.dtype)
        self._op(
            ew.OP_CONVERT,
            ew.ConvertArgs(
                rows=self._tokens,
                x=stream.address,
                y=out.address,
                size=stream.width,
                ldx=stream.stride,
                ldy=out.stride,
                x_dtype=stream.dtype,
                y_dtype=out.dtype,
                scale=1.0,
            ),
        )
        return out

    def normalise(self, x: Rows, start: int, norm: NormWeights) -> None:
        """Normalise the columns of `x` from `start` on, as many as the norm has, where they are."""
        size = 4 if x.dtype == F32 else 2
        part = Rows(x.address + start * size, x.dtype, len(norm.weight), x.stride)
        self._norm(part, norm, part, None)

    def linear(
        self,
        x: Rows,
        matrix: PackedMatrix,
        bias: torch.Tensor | None,
        role: str,
        *,
        dtype: int = F32,
        activation: str | None = None,
        to_stream: bool = False,
    ) -> Rows:
        """`x @ matrix.T + bias`, perhaps gated, into a buffer or added to the stream."""
        if (activation is not None) != matrix.interleaved:
            raise RecordingError("gate and up that are not interleaved")
        epilogue = EPILOGUE_NONE if activation is None else EPILOGUES_MUL[activation]
        if to_stream:
            out, epilogue = self._the_stream(), EPILOGUE_ADD
        else:
            out = self.buffer(role, matrix.n if activation is None else matrix.n // 2, dtype)
        bias = floats(bias)
        args = MatmulArgs(
            rows=self._tokens,
            x=x.address,
            ldx=x.stride,
            w=matrix.address,
            bias=pointer(bias),
            y=out.address,
            ldy=out.stride,
            parts=matrix.parts,
            x_dtype=x.dtype,
            y_dtype=out.dtype,
            epilogue=epilogue,
            activation_bits=matrix.activation_bits,
        )
        self._op(OP_MATMUL, args, matrix, bias)
        self._matmuls.append((args, matmul_scratch_bytes(self._threads, self.max_tokens, matrix.k)))
        return out

    def experts(
        self,
        x: Rows,
        logits: Rows,
        routing: ExpertChoice,
        matrices: tuple[PackedMatrix, PackedMatrix],
        rules: ExpertRules,
        role: str,
        *,
        to_stream: bool = False,
    ) -> Rows:
        """The weighted sum of the answers of the experts that `logits` choose.

        `matrices` are up and down, as `Kernels.pack_experts` returns them.
        """
        packed = PackedExperts(*matrices)
        if packed.num_experts > MAX_EXPERTS or logits.dtype != F32:
            raise RecordingError(f"{packed.num_experts} experts")
        rules = rules._replace(up_bias=floats(rules.up_bias), down_bias=floats(rules.down_bias))
        routing = routing._replace(bias=floats(routing.bias))
        weights = Memory(self.max_tokens * routing.k * 4)
        ids = Memory(self.max_tokens * routing.k * 4)
        route = route_args(packed.num_experts, routing)
        route.rows, route.logits, route.ld_logits = self._tokens, logits.address, logits.stride
        route.weights, route.ids = weights.address, ids.address
        self._op(OP_ROUTE, route, weights, ids, routing)
        out = self._the_stream() if to_stream else self.buffer(role, packed.hidden_size, F32)
        args = experts_args(packed, rules)
        args.rows, args.x, args.ldx, args.x_dtype = self._tokens, x.address, x.stride, x.dtype
        args.weights, args.ids, args.k = weights.address, ids.address, routing.k
        args.y, args.ldy, args.y_dtype, args.add = out.address, out.stride, F32, to_stream
        self._op(OP_EXPERTS, args, packed, rules)
        needed = packed.scratch_bytes(
            self._threads, self.max_tokens, routing.k, self.torch_dtype.itemsize
        )
        self._matmuls.append((args, needed))
        return out

    def _op(self, op: int, args: ctypes.Structure, *keep: Any) -> None:
        self._ops.append((op, args))
        self._open = None
        self._keep.extend(keep)

    def _norm(
        self, x: Rows, norm: NormWeights, out: Rows, index: np.ndarray[Any, Any] | None
    ) -> None:
        args = ew.NormArgs(
            rows=self._tokens if index is None else self._out_rows,
            index=None if index is None else address(index),
            x=x.address,
            y=out.address,
            weight=pointer(norm.weight),
            bias=pointer(norm.bias),
            size=x.width,
            ldx=x.stride,
            ldy=out.stride,
            x_dtype=x.dtype,
            y_dtype=out.dtype,
            kind=norm.kind,
            eps=norm.eps,
        )
        self._op(ew.OP_NORM, args, norm)

    def _the_stream(self) -> Rows:
        assert self._stream is not None, "embed() comes first"
        return self._stream

    @property
    def _threads(self) -> int:
        return self._pool.num_threads


def floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """In float32, one element after another."""
    return None if tensor is None else tensor.float().contiguous()
