"""What does native attention take, and how is it run on a step?

Mirrors `native/attention/args.h`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from jubako.kernels.cpu.library import ATTENTION_OPS, Pool, Scratch, library
from jubako.kernels.cpu.tensors import ALL_DTYPES, address, pointer
from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV

OP_PAGED_ATTENTION = ATTENTION_OPS

KV_I8, KV_F8E4M3 = 3, 4
"""Element types of pages beside the model's: int8 and fp8, a float32 scale a token and slab."""

PAGE_DTYPES = ALL_DTYPES | {torch.int8: KV_I8, torch.float8_e4m3fn: KV_F8E4M3}
"""What pages may hold, whatever the dtype of queries."""

_P = ctypes.c_void_p
_I = ctypes.c_int32
_L = ctypes.c_int64
_F = ctypes.c_float


class AttentionStep(ctypes.Structure):
    """One step, seen by the attention layers of one KV cache group."""

    _fields_ = [
        ("num_reqs", _L),
        ("num_tokens", _L),
        ("query_start_loc", _P),
        ("seq_lens", _P),
        ("block_table", _P),
        ("block_table_stride", _L),
        ("slot_mapping", _P),
        ("max_query_len", _I),
        ("max_seq_len", _I),
        ("key_begin", _P),
        ("key_end", _P),
    ]


class AttentionArgs(ctypes.Structure):
    """Attention of a step's queries to pages."""

    _fields_ = [
        ("step", _P),
        ("q", _P),
        ("q_stride", _L),
        ("out", _P),
        ("out_stride", _L),
        ("pages", _P),
        *((name, _L) for name in ("block_stride", "head_stride", "row_stride")),
        *((name, _L) for name in ("value_offset", "scale_offset")),
        *((name, _I) for name in ("dtype", "kv_dtype", "num_heads", "num_kv_heads")),
        *((name, _I) for name in ("head_size", "value_size", "block_size")),
        *((name, _I) for name in ("window", "chunk", "causal")),
        ("scale", _F),
        ("soft_cap", _F),
        ("sinks", _P),
        ("scratch", _P),
        ("scratch_bytes", _L),
    ]


def attention_scratch_bytes(
    threads: int, num_heads: int, head_size: int, value_size: int, max_reqs: int, max_seq_len: int
) -> int:
    """Bytes of zeroed scratch for steps of at most `max_reqs` requests on `threads` threads."""
    lib = library()
    assert lib is not None, "there is no native library"
    size = lib.jb_attention_scratch_bytes
    size.restype = _L
    size.argtypes = [_I, _I, _I, _I, _L, _L]
    bytes_needed: int = size(threads, num_heads, head_size, value_size, max_reqs, max_seq_len)
    return bytes_needed


def fill_step(step: AttentionStep, metadata: AttentionMetadata) -> None:
    """Point `step` at the host's arrays of `metadata`, which must outlive its use."""
    blocks = metadata.block_table_cpu
    step.num_reqs = metadata.num_reqs
    step.num_tokens = metadata.num_actual_tokens
    step.query_start_loc = address(metadata.query_start_loc_cpu)
    step.seq_lens = address(metadata.seq_lens_cpu)
    step.block_table = address(blocks)
    step.block_table_stride = blocks.strides[0] // 4
    slots = metadata.slot_mapping_cpu
    step.slot_mapping = metadata.slot_mapping.data_ptr() if slots is None else address(slots)
    step.max_query_len = metadata.max_query_len
    step.max_seq_len = metadata.max_seq_len


def set_pages(args: AttentionArgs, kv: PagedKV) -> None:
    """Let `args` read the pages of `kv`, which must outlive its use."""
    pages, size = kv.pages, kv.pages.element_size()
    args.pages = pages.data_ptr()
    args.kv_dtype = PAGE_DTYPES[pages.dtype]
    args.block_size = kv.block_size
    args.block_stride = pages.stride(0) * size
    args.head_stride = pages.stride(1) * size
    args.value_offset = pages.stride(2) * size
    args.row_stride = pages.stride(3) * size
    args.scale_offset = kv.block_size * args.row_stride


def can_attend(query: torch.Tensor, kv: PagedKV, metadata: AttentionMetadata) -> bool:
    """Whether the native op takes these."""
    arrays = (
        metadata.query_start_loc_cpu,
        metadata.seq_lens_cpu,
        metadata.block_table_cpu,
    )
    return (
        query.device.type == "cpu"
        and query.dtype in ALL_DTYPES
        and kv.pages.dtype in PAGE_DTYPES
        and query.shape[2] == kv.head_size
        and kv.head_size <= 1024
        and all(a.dtype == np.int32 and a.strides[-1] == 4 for a in arrays)
    )


def paged_attention(
    pool: Pool,
    scratch: Scratch,
    query: torch.Tensor,
    kv: PagedKV,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk_size: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **fields: int | None,
) -> torch.Tensor:
    """Attention of query [T, Hq, D] → [T, Hq, D]; see `Kernels.paged_attention`.

    Only where `can_attend` says so. The result is `out`, contiguous, if that is given; `fields`
    replace what `kv` says of the pages.
    """
    T, Hq, D = query.shape
    if query.stride(2) != 1 or query.stride(1) != D:
        query = query.contiguous()
    if out is None:
        out = torch.empty((T, Hq, D), dtype=query.dtype)
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    step = AttentionStep()
    fill_step(step, metadata)
    args = AttentionArgs(
        step=ctypes.addressof(step),
        q=query.data_ptr(),
        q_stride=query.stride(0),
        out=out.data_ptr(),
        out_stride=Hq * D,
        dtype=ALL_DTYPES[query.dtype],
        num_heads=Hq,
        num_kv_heads=kv.num_kv_heads,
        head_size=D,
        value_size=D,
        window=sliding_window or 0,
        chunk=attention_chunk_size or 0,
        causal=metadata.causal,
        scale=scale,
        soft_cap=logits_soft_cap or 0.0,
        sinks=pointer(sinks),
    )
    set_pages(args, kv)
    for name, value in fields.items():
        setattr(args, name, value)
    needed = attention_scratch_bytes(
        pool.num_threads, Hq, D, D, metadata.num_reqs, metadata.max_seq_len
    )
    scratch.run(pool, OP_PAGED_ATTENTION, args, needed)
    return out
