"""Native attention equals dense attention in float64, at every level, for every rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from jubako.kernels.cpu import attention as native
from jubako.kernels.cpu.library import Pool
from jubako.kernels.reference.kv_write import reshape_and_cache

from ..test_attention import ROWS, TOLERANCE, Case
from .conftest import pool_at

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

MIXED = [(1, 1), (23, 23), (1, 700), (5, 40), (70, 130), (1, 1100), (2, 513), (0, 5), (1, 512)]
"""Decodes, drafts, prompts and chunks, some of which end where a part of the keys does."""


class NativeCase(Case):
    """A case that the native op computes."""

    def __init__(self, pool: Pool, rows: list[tuple[int, int]], **settings: Any) -> None:
        super().__init__(rows, **settings)
        self.pool = pool
        self.scratch = native.Scratch()

    def write(self) -> None:
        """This step's keys and values."""
        new = [slice(s - q, s) for q, s in zip(self.query_lens, self.seq_lens)]
        key = torch.cat([k[part] for k, part in zip(self.keys, new)])
        value = torch.cat([v[part] for v, part in zip(self.values, new)])
        reshape_and_cache(key, value, self.kv, self.metadata)

    def run(
        self,
        scale: float = 0.3,
        window: int | None = None,
        cap: float | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.write()
        assert native.can_attend(self.query, self.kv, self.metadata)
        return native.paged_attention(
            self.pool,
            self.scratch,
            self.query,
            self.kv,
            self.metadata,
            scale=scale,
            sliding_window=window,
            logits_soft_cap=cap,
            attention_chunk_size=chunk,
            sinks=sinks,
        )


RULES = [
    {},
    {"window": 1},
    {"window": 6},
    {"window": 600},
    {"cap": 4.0},
    {"sinks": SINKS},
    {"chunk": 8},
    {"chunk": 512, "sinks": SINKS},
    {"window": 33, "cap": 4.0, "sinks": SINKS},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rules(native_pool: Pool, dtype: torch.dtype) -> None:
    for rules in RULES:
        NativeCase(native_pool, MIXED, dtype=dtype, head_size=16).check(**rules)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_sizes(native_pool: Pool, dtype: torch.dtype) -> None:
    rows = [(1, 70), (5, 40), (37, 99)]
    for size in (1, 8, 16, 20, 40, 64, 80, 96, 128, 192, 256, 512):
        NativeCase(native_pool, rows, dtype=dtype, head_size=size, block_size=32).check(
            scale=size**-0.5
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_query_head_groups(native_pool: Pool, dtype: torch.dtype) -> None:
    rows = [(1, 70), (3, 20), (37, 99)]
    for heads, kv_heads in ((4, 4), (6, 2), (8, 1), (1, 1), (3, 3), (40, 1), (66, 2), (300, 1)):
        NativeCase(
            native_pool, rows, dtype=dtype, head_size=16, heads=heads, kv_heads=kv_heads
        ).check()


def test_block_sizes_and_padded_pages(native_pool: Pool) -> None:
    rows = [(1, 70), (5, 40), (37, 99), (1, 1100)]
    for size in (1, 3, 8, 16, 32, 128):
        for dtype in DTYPES:
            NativeCase(
                native_pool, rows, dtype=dtype, head_size=16, block_size=size, padding_slabs=3
            ).check(window=33)


def test_rows_of_the_reference(native_pool: Pool) -> None:
    for rows in ROWS.values():
        for dtype in DTYPES:
            NativeCase(native_pool, rows, dtype=dtype).check()


def test_large_scores_do_not_overflow(native_pool: Pool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = NativeCase(native_pool, [(1, 90), (40, 90)], dtype=dtype, head_size=16)
        # Scores of a thousand have an error of their own.
        error = case.run(scale=300.0).double() - case.dense(scale=300.0)
        assert error.abs().max() < 1e-2


def _copy_request(into: NativeCase, i: int, source: NativeCase, j: int) -> None:
    """Request i gets the keys, values and last queries of request j of another case."""
    length, count = into.seq_lens[i], into.query_lens[i]
    into.keys[i] = source.keys[j][:length]
    into.values[i] = source.values[j][:length]
    queries = source.query.split(source.query_lens)[j]
    first = length - count - (source.seq_lens[j] - source.query_lens[j])
    start = sum(into.query_lens[:i])
    into.query[start : start + count] = queries[first : first + count]
    B = into.kv.block_size
    table = into.metadata.block_table_cpu[i]
    for p in range(length - count):
        page = into.kv.pages[table[p // B], :, :, p % B]
        page[:, 0], page[:, 1] = into.keys[i][p], into.values[i][p]


@pytest.mark.parametrize("window", [None, 100])
def test_a_float32_row_has_the_same_bits_however_it_is_computed(
    level: str, window: int | None
) -> None:
    """In one prompt or in chunks, alone or among others, on one thread or more."""
    length = 1100
    whole = NativeCase(pool_at(level, 1), [(length, length)], head_size=48, block_size=16)
    want = whole.run(window=window)
    others = [(1, 3000), (40, 90)]
    for threads in (1, 2, 3):
        for begin, end in ((0, 37), (37, 513), (513, 514), (514, 520), (1099, 1100)):
            for rows in ([(end - begin, end)], [*others, (end - begin, end), (1, 9)]):
                case = NativeCase(pool_at(level, threads), rows, head_size=48, block_size=16)
                i = rows.index((end - begin, end))
                _copy_request(case, i, whole, 0)
                start = sum(case.query_lens[:i])
                got = case.run(window=window)[start : start + end - begin]
                assert torch.equal(got, want[begin:end]), (threads, begin, end, len(rows))


def test_long_contexts_are_split_over_threads(level: str) -> None:
    rows = [(1, 5000), (2, 2500), (1, 30)]
    for dtype in (torch.float32, torch.bfloat16):
        case = NativeCase(pool_at(level, 3), rows, dtype=dtype, head_size=16, block_size=32)
        case.check()
        # What a step leaves in the scratch must not spoil the next one.
        case.query = torch.randn(case.query.shape).to(dtype)
        case.check()
        case.check(sinks=SINKS)
        case.check(window=700)


def test_nothing_past_the_context_or_before_the_window_is_read(native_pool: Pool) -> None:
    case = NativeCase(native_pool, [(3, 38), (1, 17), (40, 90)], dtype=torch.bfloat16)
    table = case.metadata.block_table_cpu
    for row, first in ((0, 29), (1, 10), (2, 44)):
        case.kv.pages[torch.from_numpy(table[row, : first // 4]).long()] = math.nan
        table[row, : first // 4] = 1_000_000
    case.check(window=7)


def test_padding_requests_are_ignored(native_pool: Pool) -> None:
    case = NativeCase(native_pool, ROWS["decodes"])
    metadata = case.metadata
    metadata.num_reqs += 2
    last = metadata.query_start_loc_cpu[-1]
    metadata.query_start_loc_cpu = np.append(metadata.query_start_loc_cpu, [last, last])
    metadata.seq_lens_cpu = np.append(metadata.seq_lens_cpu, np.zeros(2, np.int32))
    minus = np.full((2, metadata.block_table_cpu.shape[1]), -1, np.int32)
    metadata.block_table_cpu = np.concatenate([metadata.block_table_cpu, minus])
    case.check()


def _dense(
    case: NativeCase, keys: list[torch.Tensor], values: list[torch.Tensor], visible: list[Any]
) -> torch.Tensor:
    """Attention of each request's queries by mask [queries, keys], in float64."""
    outs = []
    for q, k, v, mask in zip(case.query.double().split(case.query_lens), keys, values, visible):
        group = q.shape[1] // k.shape[1]
        k = k.double().repeat_interleave(group, 1)
        v = v.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 9])
def test_both_directions(native_pool: Pool, dtype: torch.dtype, window: int | None) -> None:
    case = NativeCase(native_pool, [(50, 50), (7, 60), (1, 5)], dtype=dtype, head_size=16)
    case.metadata.causal = False
    got = case.run(window=window)
    visible = []
    for q, s in zip(case.query_lens, case.seq_lens):
        distance = torch.arange(s - q, s)[:, None] - torch.arange(s)
        visible.append(distance.abs() < (window or s + 1))
    want = _dense(case, case.keys, case.values, visible)
    assert (got.double() - want).abs().max() < TOLERANCE[dtype]


def test_more_queries_than_keys(native_pool: Pool) -> None:
    """As in attention to an encoder's output."""
    for dtype in (torch.float32, torch.bfloat16):
        case = NativeCase(native_pool, [(5, 5), (40, 40)], dtype=dtype, head_size=16)
        case.write()
        case.metadata.causal = False
        case.metadata.seq_lens_cpu = np.array([3, 7], np.int32)
        got = native.paged_attention(
            native_pool, native.Scratch(), case.query, case.kv, case.metadata, scale=0.3
        )
        keys, values = ([x[:n] for x, n in zip(xs, (3, 7))] for xs in (case.keys, case.values))
        visible = [torch.ones(5, 3, dtype=torch.bool), torch.ones(40, 7, dtype=torch.bool)]
        want = _dense(case, keys, values, visible)
        assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_pages_of_scaled_bytes(native_pool: Pool, kind: str) -> None:
    B, heads, D = 16, 2, 48
    case = NativeCase(native_pool, [(1, 600), (40, 90)], head_size=D, block_size=B)
    slab = B * D + 4 * B
    num_blocks = case.kv.pages.shape[0]
    raw = torch.full((num_blocks, heads, 2, slab), 127, dtype=torch.uint8)
    scales = raw[..., B * D :].view(torch.float32)
    data = raw[..., : B * D].unflatten(-1, (B, D))
    for i, xs in enumerate((case.keys, case.values)):
        for r, x in enumerate(xs):
            scale = x.abs().amax(-1, keepdim=True) / (127 if kind == "int8" else 448)
            if kind == "int8":
                stored = (x / scale).round().to(torch.int8)
            else:
                stored = (x / scale).to(torch.float8_e4m3fn)
            x.copy_(stored.float() * scale)
            for p in range(len(x)):
                block = case.metadata.block_table_cpu[r, p // B]
                data[block, :, i, p % B] = stored[p].view(torch.uint8)
                scales[block, :, i, p % B] = scale[p, :, 0]
    got = native.paged_attention(
        native_pool,
        native.Scratch(),
        case.query,
        case.kv,
        case.metadata,
        scale=0.3,
        kv_dtype=native.KV_I8 if kind == "int8" else native.KV_F8E4M3,
        pages=raw.data_ptr(),
        block_stride=raw.stride(0),
        head_stride=raw.stride(1),
        value_offset=raw.stride(2),
        row_stride=D,
        scale_offset=B * D,
    )
    assert (got.double() - case.dense()).abs().max() < TOLERANCE[torch.float32]
