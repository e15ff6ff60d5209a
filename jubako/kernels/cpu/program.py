"""How does a model become one native call a step?

Layers that can are asked once, after loading, to `record` what they would do: a flat list of ops
over buffers that live as long as the program. What changes from step to step (the number of rows,
tokens, positions, addresses of the KV) is reached through pointers, so that a step only fills a few
arrays and walks the list.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

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
from jubako.kernels.cpu.head_candidates import CandidateHead
from jubako.kernels.cpu.library import Memory, Pool, program_array
from jubako.kernels.cpu.packed_matrix import PackedMatrix
from jubako.kernels.cpu.recorder import floats
from jubako.kernels.cpu.recording import (
    AttentionShape,
    NativeRotation,
    NormWeights,
    RecordingError,
    Rows,
)
from jubako.kernels.cpu.recurrent_ops import RecurrentOps
from jubako.kernels.cpu.tensors import address, pointer
from jubako.kernels.metadata import AttentionMetadata


class NativeProgram(RecurrentOps):
    """The ops of one model, its buffers, and the step they run on."""

    def __init__(self, dtype: torch.dtype, max_tokens: int, max_reqs: int, pool: Pool) -> None:
        super().__init__(dtype, max_tokens, max_reqs, pool)
        self._attentions: dict[str, tuple[ew.RopeArgs, AttentionArgs]] = {}
        self._greedy: HeadGreedyArgs | None = None
        self.candidates: CandidateHead | None = None
        """Finds the tokens among which a result row's choice lies, where that needs no logits."""

        self._out_index = np.zeros(max_tokens, np.int64)
        self._chosen = np.zeros(max_tokens, np.int64)
        self._nowhere = np.full(max_tokens, -1, np.int64)
        self._steps = [self._empty_step()]
        self._groups: list[str] = []
        self._hidden: torch.Tensor
        self._array: Any = None

    def attention(
        self,
        qkv: Rows,
        shape: AttentionShape,
        rotation: NativeRotation | None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        interleaved: bool = False,
        query_scale: Rows | None = None,
    ) -> Rows:
        """Heads to attended heads; keys and values go into the pages on the way.

        `norm` [Hq + Hkv, D] float32 normalises query and key heads, `query_scale` multiplies
        queries by a number for each token.
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
        if query_scale is not None:
            self.gate(query, query_scale, "identity", None)
        sinks = floats(shape.sinks)
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

    def greedy_head(self, hidden: Rows, matrix: PackedMatrix, plain: bool) -> None:
        """The last op, left out where logits are needed: the best token of each result row.

        With `plain` logits, which are the products themselves, candidates can be had as well.
        """
        if plain:
            self.candidates = CandidateHead(matrix, self._pool)
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
        self._finish_states()
        scratch = Memory(max(needed for _, needed in self._matmuls))
        self._keep.append(scratch)
        for args, _ in self._matmuls:
            args.scratch, args.scratch_bytes = scratch.address, scratch.num_bytes

    # -- the KV cache -------------------------------------------------------------------------

    def bind(
        self,
        layers: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
        max_seq_len: int,
    ) -> None:
        """Use these layers' pages and states. `groups` names the layers of each KV group.

        Until then a program runs without keys: attention gives what its buffer holds.
        """
        scratch_bytes = 0
        self._steps, self._groups = [], []
        for group in groups:
            self._bind_states({name: layers[name] for name in group})
            names = [name for name in group if name in self._attentions]
            if not names:
                continue
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
        self._fill_states(attention, count)
        self._pool.run_program(
            self._array, len(self._ops) + (greedy and self.chooses_greedily), times
        )
        hidden = self._hidden[:out_rows]
        return hidden, self._chosen[:out_rows].copy() if greedy else None
