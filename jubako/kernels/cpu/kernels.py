"""Which functions does the native implementation offer, one op at a time?

What it does not take (float16, another device, unusual strides) the reference computes. A model
whose layers can record themselves runs as a program instead, see `program`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from jubako.kernels.cpu import elementwise as ew
from jubako.kernels.cpu.attention import PAGE_DTYPES, can_attend, paged_attention
from jubako.kernels.cpu.experts import PackedExperts, run_experts
from jubako.kernels.cpu.library import Scratch, pool
from jubako.kernels.cpu.matmul import (
    EPILOGUE_NONE,
    EPILOGUES_MUL,
    OP_EMBED,
    OP_MATMUL,
    EmbedArgs,
    MatmulArgs,
    matmul_scratch_bytes,
)
from jubako.kernels.cpu.packed_matrix import GGUF_KINDS, PackedMatrix, Piece
from jubako.kernels.cpu.recording import LAYER_NORM, RMS_NORM, ExpertRules
from jubako.kernels.cpu.recurrent import RecurrentKernels
from jubako.kernels.cpu.tensors import DTYPES, address, pointer
from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.reference.kernels import ReferenceKernels

_KINDS = {"int8": "INT8", "int4": "Q4_0"}
"""Quantization → the kind of packed matrix; the others keep the dtype."""
_IDS_BITS = {torch.int32: 32, torch.int64: 64}


class CpuKernels(RecurrentKernels):
    """`kernels.interface.Kernels` in native code."""

    name = "cpu"

    def __init__(self) -> None:
        self._matmul_scratch, self._attention_scratch = Scratch(), Scratch()
        super().__init__(pool(torch.get_num_threads()))

    def use_threads(self, num_threads: int) -> None:
        """Run on that many threads from now on."""
        self.use_pool(pool(num_threads))
        self._matmul_scratch, self._attention_scratch = Scratch(), Scratch()

    # -- matrices -----------------------------------------------------------------------------

    def pack(  # type: ignore[override]
        self, weight: torch.Tensor, interleaved: bool = False, quantization: str = "none"
    ) -> PackedMatrix | None:
        if weight.dtype not in DTYPES or weight.device.type != "cpu":
            return None
        kind = _KINDS.get(quantization)
        if kind == "Q4_0" and weight.shape[1] % 32:
            kind = "INT8"
        return PackedMatrix.from_tensor(
            weight.contiguous(), self.pool, interleaved=interleaved, kind=kind, consume=True
        )

    def pack_blocks(  # type: ignore[override]
        self, pieces: Sequence[Any], interleaved: bool = False
    ) -> PackedMatrix | None:
        types = {piece.type for piece in pieces}
        if not types <= set(GGUF_KINDS) or (interleaved and len(types) > 1):
            return None
        blocks = [Piece(piece.data, piece.type) for piece in pieces]
        return PackedMatrix.from_blocks(
            blocks, pieces[0].shape[1], self.pool, interleaved=interleaved, consume=True
        )

    def packed_linear(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert not matrix.interleaved, "a gated matrix has a gated product"
        return self._product(x, matrix, bias, None)

    def packed_gated_linear(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        return self._product(x, matrix, bias, activation)

    def _product(
        self,
        x: torch.Tensor,
        matrix: PackedMatrix,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        wide = x.reshape(-1, x.shape[-1])
        if wide.stride(1) != 1:
            wide = wide.contiguous()
        rows = wide.shape[0]
        width = matrix.n if activation is None else matrix.n // 2
        out = torch.empty(rows, width, dtype=x.dtype)
        count = ctypes.c_int64(rows)
        bias = None if bias is None else bias.float().contiguous()
        self._matmul_scratch.run(
            self.pool,
            OP_MATMUL,
            MatmulArgs(
                rows=ctypes.addressof(count),
                x=wide.data_ptr(),
                ldx=wide.stride(0),
                w=matrix.address,
                bias=pointer(bias),
                y=out.data_ptr(),
                ldy=width,
                parts=matrix.parts,
                x_dtype=DTYPES[x.dtype],
                y_dtype=DTYPES[x.dtype],
                epilogue=EPILOGUES_MUL[activation] if activation else EPILOGUE_NONE,
                activation_bits=matrix.activation_bits,
            ),
            matmul_scratch_bytes(self.pool.num_threads, rows, matrix.k),
        )
        return out.view(*x.shape[:-1], width)

    def packed_embedding(
        self, input_ids: torch.Tensor, matrix: PackedMatrix, dtype: torch.dtype
    ) -> torch.Tensor:
        ids = input_ids.reshape(-1).contiguous()
        out = torch.empty(len(ids), matrix.k, dtype=dtype)
        count = ctypes.c_int64(len(ids))
        self.pool.run(
            OP_EMBED,
            EmbedArgs(
                rows=ctypes.addressof(count),
                ids=ids.data_ptr(),
                w=matrix.address,
                y=out.data_ptr(),
                ldy=matrix.k,
                scale=1.0,
                ids_bits=_IDS_BITS[ids.dtype],
                y_dtype=DTYPES[dtype],
            ),
        )
        return out.view(*input_ids.shape, matrix.k)

    # -- experts ------------------------------------------------------------------------------

    def pack_experts(  # type: ignore[override]
        self, up: torch.Tensor, down: torch.Tensor, gated: bool = True, quantization: str = "none"
    ) -> tuple[PackedMatrix, PackedMatrix] | None:
        if up.dtype not in DTYPES or up.device.type != "cpu":
            return None
        kind = _KINDS.get(quantization)
        if kind == "Q4_0" and (up.shape[2] % 32 or down.shape[2] % 32):
            kind = "INT8"
        packed = PackedExperts.from_tensors(up, down, self.pool, gated=gated, kind=kind)
        return packed.up, packed.down

    def packed_experts(
        self,
        x: torch.Tensor,
        experts: tuple[PackedMatrix, PackedMatrix],
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        rules: ExpertRules,
    ) -> torch.Tensor:
        packed = PackedExperts(*experts)
        return run_experts(self.pool, self._matmul_scratch, packed, rules, x, weights, expert_ids)

    # -- rows ---------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # type: ignore[override]
        return self._norm(x, weight, None, eps, RMS_NORM)

    def layer_norm(  # type: ignore[override]
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return self._norm(x, weight, bias, eps, LAYER_NORM)

    def _norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        kind: int,
    ) -> torch.Tensor:
        if not _takes(x) or x.dim() != 2 or weight.dtype != torch.float32:
            if kind == RMS_NORM:
                return super().rms_norm(x, weight, eps)
            return super().layer_norm(x, weight, bias, eps)
        rows, size = x.shape
        out = torch.empty(rows, size, dtype=x.dtype)
        count = ctypes.c_int64(rows)
        weight = weight.contiguous()
        self.pool.run(
            ew.OP_NORM,
            ew.NormArgs(
                rows=ctypes.addressof(count),
                x=x.data_ptr(),
                y=out.data_ptr(),
                weight=weight.data_ptr(),
                bias=pointer(bias),
                size=size,
                ldx=x.stride(0),
                ldy=size,
                x_dtype=DTYPES[x.dtype],
                y_dtype=DTYPES[x.dtype],
                kind=kind,
                eps=eps,
            ),
        )
        return out

    def qk_norm_rope(  # type: ignore[override]
        self,
        qk: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float = 0.0,
        interleaved: bool = False,
    ) -> torch.Tensor:
        rows, heads, D = qk.shape
        if not _takes(qk) or D > ew.MAX_HEAD_SIZE or not cos.stride(-1) == sin.stride(-1) == 1:
            return super().qk_norm_rope(qk, cos, sin, weight, eps, interleaved)
        out = torch.empty(qk.shape, dtype=qk.dtype)
        count = ctypes.c_int64(rows)
        rotary = cos.shape[-1]
        assert cos.stride(0) == sin.stride(0) or rows <= 1
        weight = None if weight is None else weight.contiguous()
        self.pool.run(
            ew.OP_ROPE,
            ew.RopeArgs(
                rows=ctypes.addressof(count),
                cos=cos.data_ptr(),
                # The second half: the sines themselves.
                sin=sin.data_ptr() + rotary // 2 * 4,
                qkv=qk.data_ptr(),
                q_out=out.data_ptr(),
                weight=pointer(weight),
                ld_table=cos.stride(0),
                ld_token=qk.stride(0),
                ld_head=qk.stride(1),
                ld_out_token=heads * D,
                dtype=DTYPES[qk.dtype],
                out_dtype=DTYPES[qk.dtype],
                num_heads=heads,
                head_size=D,
                rotary=rotary,
                interleaved=interleaved,
                eps=eps,
            ),
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self._gated(gate_up, "silu")

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self._gated(gate_up, "gelu_tanh")

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self._gated(gate_up, "gelu")

    def _gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if not _takes(gate_up) or gate_up.dim() != 2:
            function = getattr(ReferenceKernels, f"{activation}_and_mul")
            result: torch.Tensor = function(gate_up)
            return result
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype)
        count = ctypes.c_int64(rows)
        self.pool.run(
            ew.OP_GATED_ACTIVATION,
            ew.GatedActivationArgs(
                rows=ctypes.addressof(count),
                x=gate_up.data_ptr(),
                y=out.data_ptr(),
                size=size,
                ldx=gate_up.stride(0),
                ldy=size,
                x_dtype=DTYPES[gate_up.dtype],
                y_dtype=DTYPES[gate_up.dtype],
                activation=ew.ACTIVATIONS[activation],
            ),
        )
        return out

    # -- attention ----------------------------------------------------------------------------

    def reshape_and_cache(  # type: ignore[override]
        self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, metadata: AttentionMetadata
    ) -> None:
        slots = metadata.slot_mapping_cpu
        pages = kv.pages
        taken = _takes(key) and _takes(value) and kv.head_size <= ew.MAX_HEAD_SIZE
        if slots is None or not taken:
            super().reshape_and_cache(key, value, kv, metadata)
            return
        count = ctypes.c_int64(min(len(slots), len(key)))
        self.pool.run(
            ew.OP_KV_WRITE,
            ew.KvWriteArgs(
                rows=ctypes.addressof(count),
                key=key.data_ptr(),
                value=value.data_ptr(),
                slots=address(slots),
                pages=pages.data_ptr(),
                key_token=key.stride(0),
                key_head=key.stride(1),
                value_token=value.stride(0),
                value_head=value.stride(1),
                block_stride=pages.stride(0) * pages.element_size(),
                dtype=DTYPES[key.dtype],
                kv_dtype=PAGE_DTYPES[pages.dtype],
                num_kv_heads=kv.num_kv_heads,
                head_size=kv.head_size,
                block_size=kv.block_size,
            ),
        )

    def paged_attention(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: PagedKV,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        attention_chunk_size: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rules: dict[str, Any] = {
            "scale": scale,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "attention_chunk_size": attention_chunk_size,
            "sinks": sinks,
        }
        if not can_attend(query, kv, metadata):
            return super().paged_attention(query, key, value, kv, metadata, **rules)
        return paged_attention(self.pool, self._attention_scratch, query, kv, metadata, **rules)


def _takes(x: torch.Tensor) -> bool:
    return x.dtype in DTYPES and x.device.type == "cpu" and x.stride(-1) == 1
