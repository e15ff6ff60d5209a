"""How does a model become one native call a step?

Layers that can are asked once, after loading, to `record` what they would do: a flat list of ops
over buffers that live as long as the program. What changes from step to step (the number of rows,
tokens, positions, addresses of the KV) is reached through pointers, so that a step only fills a few
arrays and walks the list.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from jubako.kernels.cpu import elementwise as ew
from jubako.kernels.cpu.attention import (
    OP_PAGED_ATTENTION,
    AttentionArgs,
    AttentionStep,
    attention_scratch_bytes,
    fill_step,
    set_pages,
)
from jubako.kernels.cpu.head import OP_HEAD_GREEDY, HeadGreedyArgs, head_scratch_bytes
from jubako.kernels.cpu.library import F32, Memory, Pool, program_array
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
    AttentionShape,
    NativeRotation,
    NormWeights,
    RecordingError,
    Rows,
)
from jubako.kernels.cpu.tensors import DTYPES, address, pointer
from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV


class AttentionLayer(Protocol):
    """A layer whose pages a program writes and reads."""

    kv: PagedKV | None


class NativeProgram:
    """The ops of one model, its buffers, and the step they run on.

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
        self._attentions: dict[str, tuple[ew.RopeArgs, AttentionArgs]] = {}
        self._open: ew.AddNormArgs | None = None
        self._stream: Rows | None = None
        self._greedy: HeadGreedyArgs | None = None

        self._counts = (ctypes.c_int64 * 2)()
        self._tokens = ctypes.addressof(self._counts)
        self._out_rows = self._tokens + 8
        self.input_ids = np.zeros(max_tokens, np.int32)
        self.positions = np.zeros(max_tokens, np.int64)
        self._out_index = np.zeros(max_tokens, np.int64)
        self._chosen = np.zeros(max_tokens, np.int64)
        self._nowhere = np.full(max_tokens, -1, np.int64)
        self._steps = [self._empty_step()]
        self._groups: list[str] = []
        self._hidden: torch.Tensor
        self._array: Any = None

    # -- recording ----------------------------------------------------------------------------

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
        bias = None if bias is None else bias.float().contiguous()
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

    def attention(
        self,
        qkv: Rows,
        shape: AttentionShape,
        rotation: NativeRotation | None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        interleaved: bool = False,
    ) -> Rows:
        """Heads to attended heads; keys and values go into the pages on the way.

        `norm` [Hq + Hkv, D] float32 normalises query and key heads.
        """
        D, Hq = shape.head_size, shape.num_heads
        if D > ew.MAX_HEAD_SIZE:
            raise RecordingError(f"head size {D}")
        query = self.buffer("query", Hq * D, self.dtype)
        out = self.buffer("attended", Hq * D, self.dtype)
        step = ctypes.addressof(self._steps[0])
        rope = ew.RopeArgs(
            rows=self._tokens,
            qkv=qkv.address,
            q_out=query.address,
            weight=pointer(norm),
            slots=step + AttentionStep.slot_mapping.offset,
            pages=address(self._nowhere),
            ld_token=qkv.stride,
            ld_head=D,
            ld_out_token=query.stride,
            dtype=qkv.dtype,
            out_dtype=self.dtype,
            kv_dtype=self.dtype,
            num_heads=Hq,
            num_kv_heads=shape.num_kv_heads,
            head_size=D,
            interleaved=interleaved,
            block_size=1,
            eps=eps,
        )
        if rotation is not None:
            rope.cos, rope.sin, rope.ld_table = rotation.cos, rotation.sin, rotation.stride
            rope.rotary = rotation.size
        self._op(ew.OP_ROPE, rope, norm)
        sinks = None if shape.sinks is None else shape.sinks.float().contiguous()
        args = AttentionArgs(
            step=step,
            q=query.address,
            q_stride=query.stride,
            out=out.address,
            out_stride=out.stride,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            num_heads=Hq,
            num_kv_heads=shape.num_kv_heads,
            head_size=D,
            value_size=D,
            block_size=1,
            window=shape.sliding_window or 0,
            chunk=shape.attention_chunk_size or 0,
            causal=1,
            scale=shape.scale,
            soft_cap=shape.logits_soft_cap or 0.0,
            sinks=pointer(sinks),
        )
        self._op(OP_PAGED_ATTENTION, args, sinks)
        self._attentions[shape.layer_name] = (rope, args)
        return out

    def final_norm(self, norm: NormWeights) -> Rows:
        """Hidden states of the rows that are wanted, in the model's dtype: the program's result."""
        self._open = None
        stream = self._the_stream()
        out = self.buffer("hidden", stream.width, self.dtype)
        self._norm(stream, norm, out, self._out_index)
        rows, memory = self._buffers["hidden", stream.width, self.dtype]
        flat = torch.frombuffer(memory.buffer(), dtype=self.torch_dtype)
        self._hidden = flat.view(self.max_tokens, -1)[:, : rows.width]
        return out

    def greedy_head(self, hidden: Rows, matrix: PackedMatrix) -> None:
        """The last op, left out where logits are needed: the best token of each result row."""
        self._greedy = HeadGreedyArgs(
            rows=self._out_rows,
            x=hidden.address,
            ldx=hidden.stride,
            w=matrix.address,
            ids=address(self._chosen),
            x_dtype=hidden.dtype,
            round_dtype=self.dtype,
            activation_bits=matrix.activation_bits,
        )
        self._keep.append(matrix)
        needed = head_scratch_bytes(self._threads, self._max_reqs, matrix.k)
        self._matmuls.append((self._greedy, needed))

    def finish(self) -> None:
        """Recording is over."""
        ops = list(self._ops)
        if self._greedy is not None:
            ops.append((OP_HEAD_GREEDY, self._greedy))
        self._array = program_array(ops)
        scratch = Memory(max(needed for _, needed in self._matmuls))
        self._keep.append(scratch)
        for args, _ in self._matmuls:
            args.scratch, args.scratch_bytes = scratch.address, scratch.num_bytes

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

    # -- the KV cache -------------------------------------------------------------------------

    def bind(
        self,
        layers: Mapping[str, AttentionLayer],
        groups: Sequence[Sequence[str]],
        max_seq_len: int,
    ) -> None:
        """Use these layers' pages. `groups` names the layers of each KV group.

        Until then a program runs without keys: attention gives what its buffer holds.
        """
        scratch_bytes = 0
        self._steps, self._groups = [], []
        for names in groups:
            step = self._empty_step()
            where = ctypes.addressof(step)
            self._steps.append(step)
            self._groups.append(names[0])
            for name in names:
                kv = layers[name].kv
                assert kv is not None, "bind_kv_cache() comes first"
                rope, args = self._attentions[name]
                rope.slots = where + AttentionStep.slot_mapping.offset
                args.step = where
                set_pages(args, kv)
                rope.pages, rope.kv_dtype = args.pages, args.kv_dtype
                rope.block_size, rope.block_stride = args.block_size, args.block_stride
                scratch_bytes = max(
                    scratch_bytes,
                    attention_scratch_bytes(
                        self._threads,
                        args.num_heads,
                        args.head_size,
                        args.value_size,
                        self._max_reqs,
                        max_seq_len,
                    ),
                )
        self._attention_scratch = Memory(scratch_bytes)
        for _, args in self._attentions.values():
            args.scratch = self._attention_scratch.address
            args.scratch_bytes = self._attention_scratch.num_bytes

    def _empty_step(self) -> AttentionStep:
        step = AttentionStep()
        step.slot_mapping = address(self._nowhere)
        return step

    # -- a step -------------------------------------------------------------------------------

    @property
    def chooses_greedily(self) -> bool:
        """Whether the best tokens can be had without logits."""
        return self._greedy is not None

    def run(
        self,
        input_ids: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        attention: Mapping[str, AttentionMetadata] | None,
        out_index: np.ndarray[Any, Any] | None,
        *,
        greedy: bool = False,
        times: Any = None,
    ) -> tuple[torch.Tensor, np.ndarray[Any, Any] | None]:
        """Final hidden states of the tokens `out_index`, all if None, and their best tokens.

        The states [r, hidden] are a view that the next step overwrites; the ids [r] int64 come only
        if `greedy`. `attention` None: a dry run that touches no KV.
        """
        count = len(input_ids)
        self.input_ids[:count] = input_ids
        self.positions[:count] = positions
        out_rows = count if out_index is None else len(out_index)
        self._out_index[:out_rows] = np.arange(count) if out_index is None else out_index
        self._counts[0], self._counts[1] = count, out_rows
        for step, name in zip(self._steps, self._groups):
            if attention is None:
                step.num_reqs = step.num_tokens = 0
                step.slot_mapping = address(self._nowhere)
            else:
                fill_step(step, attention[name])
        self._pool.run_program(
            self._array, len(self._ops) + (greedy and self.chooses_greedily), times
        )
        hidden = self._hidden[:out_rows]
        return hidden, self._chosen[:out_rows].copy() if greedy else None
