"""Paged attention equals dense attention in float64, for every mask and mixture of rows."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from jubako.errors import ConfigError
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.reference import gather
from jubako.kernels.reference.attention import paged_attention
from jubako.kernels.reference.chunked_local import cut_at_chunks
from jubako.kernels.reference.kv_write import reshape_and_cache

from .paging import make_metadata, scrambled_tables

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case:
    """Random keys and values for some requests; pages hold NaN wherever nothing was written."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        padding_slabs: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query_lens = [q for q, _ in rows]
        self.seq_lens = [s for _, s in rows]
        tables, num_blocks = scrambled_tables(
            self.seq_lens, block_size, np.random.default_rng(seed)
        )
        self.metadata = make_metadata(self.query_lens, self.seq_lens, tables, block_size)
        page = (2 * kv_heads + padding_slabs) * block_size * head_size * dtype.itemsize
        self.kv = PagedKV.from_raw(
            torch.zeros(num_blocks, page, dtype=torch.int8),
            num_kv_heads=kv_heads,
            block_size=block_size,
            head_size=head_size,
            dtype=dtype,
        )
        self.kv.slabs.fill_(math.nan)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.keys = [random(s, kv_heads, head_size) for s in self.seq_lens]
        self.values = [random(s, kv_heads, head_size) for s in self.seq_lens]
        self.query = random(sum(self.query_lens), heads, head_size)
        for (q, s), table, key, value in zip(rows, tables, self.keys, self.values):
            for p in range(s - q):
                page_view = self.kv.pages[table[p // block_size], :, :, p % block_size]
                page_view[:, 0], page_view[:, 1] = key[p], value[p]

    def run(
        self,
        scale: float = 0.3,
        window: int | None = None,
        cap: float | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        new = [slice(s - q, s) for q, s in zip(self.query_lens, self.seq_lens)]
        key = torch.cat([k[part] for k, part in zip(self.keys, new)])
        value = torch.cat([v[part] for v, part in zip(self.values, new)])
        reshape_and_cache(key, value, self.kv, self.metadata)
        return paged_attention(
            self.query,
            key,
            value,
            self.kv,
            self.metadata,
            scale=scale,
            sliding_window=window,
            logits_soft_cap=cap,
            attention_chunk_size=chunk,
            sinks=sinks,
        )

    def dense(
        self,
        scale: float = 0.3,
        window: int | None = None,
        cap: float | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outs = []
        queries = self.query.double().split(self.query_lens)
        for q, key, value in zip(queries, self.keys, self.values):
            group = q.shape[1] // key.shape[1]
            k = key.double().repeat_interleave(group, 1)
            v = value.double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            a = torch.arange(len(key) - len(q), len(key))[:, None]
            j = torch.arange(len(key))[None]
            visible = j <= a
            if window is not None:
                visible &= j > a - window
            if chunk is not None:
                visible &= j // chunk == a // chunk
            scores = scores.masked_fill(~visible, -math.inf)
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, len(q), 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = scores.softmax(-1)[..., : len(key)]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)

    def check(self, **settings: Any) -> None:
        got = self.run(**settings)
        assert got.dtype == self.query.dtype
        error = (got.double() - self.dense(**settings)).abs().max().item()
        assert error < TOLERANCE[self.query.dtype]


ROWS = {
    "prefill": [(23, 23)],
    "prefills": [(5, 5), (40, 40), (1, 1), (17, 17)],
    "long prefill": [(600, 600)],
    "chunk": [(30, 75)],
    "chunk of one block": [(4, 8)],
    "long chunk": [(530, 900)],
    "decode": [(1, 37)],
    "first token": [(1, 1)],
    "decodes": [(1, 37), (1, 1), (1, 90), (1, 4), (1, 5), (1, 64), (1, 63)],
    "drafts": [(4, 37), (4, 60), (4, 9), (4, 4)],
    "unequal drafts": [(1, 20), (3, 21), (2, 22), (3, 40)],
    "mixed": [(1, 30), (20, 20), (1, 8), (33, 50), (3, 17), (1, 100)],
}


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 16, 33, 1000])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_equals_dense(rows: list[tuple[int, int]], window: int | None) -> None:
    Case(rows).check(window=window)


@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_soft_cap(rows: list[tuple[int, int]], window: int | None) -> None:
    Case(rows).check(scale=4.0, cap=3.0, window=window)


SINKS = torch.tensor([-30.0, 0.5, 3.0, 40.0])


@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_sink_logits(rows: list[tuple[int, int]], window: int | None) -> None:
    Case(rows).check(scale=2.0, window=window, sinks=SINKS)
    Case(rows, kv_heads=4).check(scale=2.0, window=window, sinks=SINKS)
    Case(rows, kv_heads=1).check(scale=2.0, window=window, sinks=SINKS, cap=3.0)


def test_a_high_sink_takes_all_the_weight() -> None:
    out = Case(ROWS["mixed"]).run(sinks=torch.tensor([-100.0, -100.0, 0.0, 100.0]))
    plain = Case(ROWS["mixed"]).run()
    assert torch.allclose(out[:, :2], plain[:, :2], atol=1e-5)
    assert not torch.allclose(out[:, 2], plain[:, 2], atol=1e-2)
    assert (out[:, 3].abs() < 1e-6).all()


CHUNKED = {
    "at the borders": [(1, 4), (1, 5), (1, 8), (1, 9), (4, 8), (5, 8), (5, 9), (8, 8), (9, 9)],
    "cut twice": [(5, 11), (1, 9), (6, 6)],
}


@pytest.mark.parametrize("chunk", [4, 8, 32, 64, 1000])
@pytest.mark.parametrize("rows", [*ROWS.values(), *CHUNKED.values()], ids=[*ROWS, *CHUNKED])
def test_chunked_local(rows: list[tuple[int, int]], chunk: int) -> None:
    Case(rows).check(chunk=chunk)
    Case(rows, block_size=2).check(chunk=chunk, sinks=SINKS)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 60)).map(lambda t: (t[0], t[0] + t[1])),
        min_size=1,
        max_size=6,
    ),
    blocks=st.integers(1, 9),
    block_size=st.sampled_from([1, 3, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_chunked_local_in_any_mixture(
    rows: list[tuple[int, int]], blocks: int, block_size: int, seed: int
) -> None:
    Case(rows, block_size=block_size, seed=seed).check(chunk=blocks * block_size)


def test_chunks_become_requests() -> None:
    case = Case(CHUNKED["cut twice"], block_size=2)
    cut = cut_at_chunks(case.metadata, 2, 4)
    assert np.diff(cut.query_start_loc_cpu).tolist() == [2, 3, 1, 4, 2]
    assert cut.seq_lens_cpu.tolist() == [4, 3, 1, 4, 2]
    table = case.metadata.block_table_cpu
    want = [table[0, 2:4], table[0, 4:6], table[1, 4:5], table[2, 0:2], table[2, 2:3]]
    for row, blocks, length in zip(cut.block_table_cpu, want, cut.seq_lens_cpu):
        count = -(-int(length) // 2)
        assert row[:count].tolist() == blocks[:count].tolist()


def test_chunked_local_does_not_read_earlier_chunks() -> None:
    """Their blocks may be somebody else's by now."""
    case = Case([(3, 38), (1, 17)])
    table = case.metadata.block_table_cpu
    for row, first in ((0, 32), (1, 16)):
        case.kv.pages[torch.from_numpy(table[row, : first // 4]).long()] = math.nan
        table[row, : first // 4] = 1_000_000
    case.check(chunk=16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (1, 1), (3, 3)])
@pytest.mark.parametrize("window", [None, 6])
def test_query_head_groups(heads: int, kv_heads: int, window: int | None) -> None:
    Case(ROWS["mixed"], heads=heads, kv_heads=kv_heads).check(window=window)
    Case(ROWS["drafts"], heads=heads, kv_heads=kv_heads).check(window=window)


@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 16, 31])
def test_block_sizes(block_size: int, window: int | None) -> None:
    Case(ROWS["mixed"], block_size=block_size).check(window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_half_precision_keeps_softmax_in_float32(
    rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    for window in (None, 6):
        for cap in (None, 4.0):
            Case(rows, dtype=dtype, head_size=16).check(window=window, cap=cap, scale=1.0)


def test_pages_may_be_padded() -> None:
    Case(ROWS["mixed"], padding_slabs=3).check()
    Case(ROWS["mixed"], padding_slabs=1).check(window=6)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 24), st.integers(0, 60)).map(lambda t: (t[0], t[0] + t[1])),
        min_size=1,
        max_size=6,
    ),
    window=st.none() | st.integers(1, 40),
    block_size=st.sampled_from([1, 3, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_any_mixture(
    rows: list[tuple[int, int]], window: int | None, block_size: int, seed: int
) -> None:
    Case(rows, block_size=block_size, seed=seed).check(window=window)


def test_groups_too_large_for_one_gather() -> None:
    # 8 MiB are the keys and values of 32 tokens · 1,024 blocks here.
    rows = [(1, 3000), (1, 40), (1, 2900), (1, 17000), (2, 16000), (1, 16500), (1, 1)]
    Case(rows, heads=2, kv_heads=2, head_size=32, block_size=32).check()


def test_rows_do_not_influence_each_other() -> None:
    rows = ROWS["mixed"]
    together = Case(rows).run(window=6).split([q for q, _ in rows])
    case = Case(rows)
    for i, row in enumerate(rows):
        alone = Case([row])
        alone.keys, alone.values = [case.keys[i]], [case.values[i]]
        alone.query = case.query.split(case.query_lens)[i]
        q, s = row
        table = alone.metadata.block_table_cpu[0]
        for p in range(s - q):
            view = alone.kv.pages[table[p // 4], :, :, p % 4]
            view[:, 0], view[:, 1] = case.keys[i][p], case.values[i][p]
        assert torch.allclose(alone.run(window=6), together[i], atol=1e-5)


def test_padding_tokens_are_ignored() -> None:
    case = Case(ROWS["mixed"])
    want = case.run()
    padded = Case(ROWS["mixed"])
    extra = 5
    nan = torch.full((extra, 4, 8), math.nan)
    padded.query = torch.cat([padded.query, nan])
    padded.metadata.slot_mapping = torch.cat(
        [padded.metadata.slot_mapping, torch.full((extra,), -1)]
    )
    new = [slice(s - q, s) for q, s in ROWS["mixed"]]
    key = torch.cat([k[p] for k, p in zip(padded.keys, new)] + [nan[:, :2]])
    value = torch.cat([v[p] for v, p in zip(padded.values, new)] + [nan[:, :2]])
    reshape_and_cache(key, value, padded.kv, padded.metadata)
    got = paged_attention(padded.query, key, value, padded.kv, padded.metadata, scale=0.3)
    assert torch.equal(got[:-extra], want)


def test_padding_requests_are_ignored() -> None:
    case = Case(ROWS["decodes"])
    metadata = case.metadata
    n = metadata.num_reqs
    metadata.num_reqs = n + 2
    last = metadata.query_start_loc_cpu[-1]
    metadata.query_start_loc_cpu = np.append(metadata.query_start_loc_cpu, [last, last])
    metadata.seq_lens_cpu = np.append(metadata.seq_lens_cpu, [0, 0])
    minus = np.full((2, metadata.block_table_cpu.shape[1]), -1, np.int32)
    metadata.block_table_cpu = np.concatenate([metadata.block_table_cpu, minus])
    assert torch.allclose(case.run(), case.dense().float(), atol=1e-5)


def test_layers_of_one_step_share_plans_without_mixing_them_up() -> None:
    case = Case(ROWS["mixed"])
    for window in (None, 5, None, 9, 5):
        case.check(window=window)


def test_runs_inside_and_outside_of_inference_mode() -> None:
    gather._workspaces.by_place.clear()
    with torch.inference_mode():
        Case(ROWS["mixed"]).check()
    Case(ROWS["mixed"]).check()


def test_threads_do_not_gather_into_one_buffer() -> None:
    raw = torch.zeros(3, 2 * 4 * 8 * 4, dtype=torch.int8)
    kv = PagedKV.from_raw(raw, num_kv_heads=1, block_size=4, head_size=8, dtype=torch.float32)
    slabs = gather.slab_indices(torch.tensor([[1, 2]]), kv)
    mine, _ = gather.gather_slabs(kv, slabs, 1, None, torch.float32)
    with ThreadPoolExecutor(1) as pool:
        theirs, _ = pool.submit(gather.gather_slabs, kv, slabs, 1, None, torch.float32).result()
    assert mine.data_ptr() != theirs.data_ptr()


class LargestTensor(TorchDispatchMode):
    """Notes the bytes behind the largest tensor that any operator returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.nbytes = max(self.nbytes, item.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("rows", [[(8192, 8192)], [(6144, 8192)]], ids=["prompt", "chunk"])
def test_a_long_prompt_needs_no_square_mask(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    case = Case(rows, heads=2, kv_heads=1, block_size=32)
    with LargestTensor() as largest:
        case.run(window=window)
    square = rows[0][0] * rows[0][1] * 2  # bytes, in half precision
    assert largest.nbytes <= gather.WORKSPACE_BYTES < square / 4


class TestReshapeAndCache:
    def test_writes_each_token_to_its_slot_and_nothing_else(self) -> None:
        case = Case([(6, 6), (3, 10)])
        before = case.kv.slabs.clone()
        case.run()
        B = case.kv.block_size
        untouched = torch.ones_like(case.kv.pages, dtype=torch.bool)
        slots = iter(case.metadata.slot_mapping.tolist())
        for (q, s), key, value in zip([(6, 6), (3, 10)], case.keys, case.values):
            for p in range(s - q, s):
                block, offset = divmod(next(slots), B)
                assert torch.equal(case.kv.pages[block, :, 0, offset], key[p])
                assert torch.equal(case.kv.pages[block, :, 1, offset], value[p])
                untouched[block, :, :, offset] = False
        after = case.kv.pages[untouched]
        assert torch.equal(after.isnan(), before.view_as(case.kv.pages)[untouched].isnan())

    def test_negative_slots_are_skipped(self) -> None:
        case = Case([(4, 4)])
        case.metadata.slot_mapping = torch.tensor([5, -1, 2, -7])
        key, value = torch.randn(2, 4, 2, 8)
        reshape_and_cache(key, value, case.kv, case.metadata)
        written = ~case.kv.pages.isnan().any(-1).any(2).any(1)
        assert written.flatten().nonzero().flatten().tolist() == [2, 5]
        assert torch.equal(case.kv.pages[1, :, 1, 1], value[0])
        assert torch.equal(case.kv.pages[0, :, 0, 2], key[2])

    def test_rows_beyond_the_slots_are_padding(self) -> None:
        case = Case([(2, 2)])
        case.metadata.slot_mapping = torch.tensor([3])
        key, value = torch.randn(2, 4, 2, 8)
        reshape_and_cache(key, value, case.kv, case.metadata)
        assert (~case.kv.pages.isnan().any(-1)).sum() == 2 * 2

    def test_takes_slots_from_the_host_where_given(self) -> None:
        case = Case([(2, 2)])
        case.metadata.slot_mapping_cpu = np.array([0, 1])
        case.metadata.slot_mapping = torch.tensor([9, 9])
        key, value = torch.randn(2, 2, 2, 8)
        reshape_and_cache(key, value, case.kv, case.metadata)
        assert torch.equal(case.kv.pages[0, :, 0, :2], key.transpose(0, 1))


@pytest.mark.parametrize("page_bytes", [2 * 4 * 8 * 4 - 4, 3 * 4 * 8 * 4])
def test_a_page_that_does_not_fit_is_an_error(page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="KV page"):
        PagedKV.from_raw(
            torch.zeros(2, page_bytes, dtype=torch.int8),
            num_kv_heads=2,
            block_size=4,
            head_size=8,
            dtype=torch.float32,
        )
