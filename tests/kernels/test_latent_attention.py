"""Latent attention equals dense attention over expanded keys and values in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from jubako.errors import ConfigError
from jubako.kernels.paged_latent import PagedLatent
from jubako.kernels.reference import attention_parts, latent_attention
from jubako.kernels.reference.latent_attention import concat_and_cache_mla, mla_attention

from .paging import make_metadata, scrambled_tables

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SCALE = 0.3
Rows = list[tuple[int, int]]


class Case:
    """Random latents for some requests; pages hold NaN wherever nothing was written."""

    def __init__(
        self,
        rows: Rows,
        *,
        heads: int = 4,
        nope: int = 6,
        rope: int = 4,
        value: int = 5,
        latent: int = 12,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        padding_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_size, self.nope = block_size, nope
        self.query_lens = [q for q, _ in rows]
        self.seq_lens = [s for _, s in rows]
        tables, num_blocks = scrambled_tables(
            self.seq_lens, block_size, np.random.default_rng(seed)
        )
        self.metadata = make_metadata(self.query_lens, self.seq_lens, tables, block_size)
        page = block_size * (latent + rope) * dtype.itemsize + padding_bytes
        self.kv = PagedLatent.from_raw(
            torch.full((num_blocks, page), -1, dtype=torch.int8),  # NaN in every dtype
            block_size=block_size,
            latent_size=latent,
            rope_size=rope,
            dtype=dtype,
        )

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.latents = [random(s, latent) for s in self.seq_lens]
        self.rotated = [random(s, rope) for s in self.seq_lens]
        self.query = random(sum(self.query_lens), heads, nope + rope)
        self.up = random(heads, nope + value, latent) * latent**-0.5
        for (q, s), table, c, r in zip(rows, tables, self.latents, self.rotated):
            for p in range(s - q):
                self.kv.pages[table[p // block_size], p % block_size] = torch.cat((c[p], r[p]))

    def new(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's latents and rotated keys."""
        parts = [slice(s - q, s) for q, s in zip(self.query_lens, self.seq_lens)]
        latent = torch.cat([c[part] for c, part in zip(self.latents, parts)])
        return latent, torch.cat([r[part] for r, part in zip(self.rotated, parts)])

    def run(self) -> torch.Tensor:
        concat_and_cache_mla(*self.new(), self.kv, self.metadata)
        return mla_attention(self.query, self.kv, self.up, self.metadata, scale=SCALE)

    def dense(self) -> torch.Tensor:
        outs = []
        up = self.up.double()
        for q, c, r in zip(self.query.double().split(self.query_lens), self.latents, self.rotated):
            expanded = torch.einsum("hdl,kl->khd", up, c.double())
            shared = r.double()[:, None].expand(-1, up.shape[0], -1)
            keys = torch.cat((expanded[..., : self.nope], shared), dim=-1)
            scores = torch.einsum("qhd,khd->hqk", q, keys) * SCALE
            a = torch.arange(len(c) - len(q), len(c))[:, None]
            scores = scores.masked_fill(torch.arange(len(c)) > a, -math.inf)
            outs.append(
                torch.einsum("hqk,khd->qhd", scores.softmax(-1), expanded[..., self.nope :])
            )
        return torch.cat(outs)

    def check(self) -> None:
        got = self.run()
        assert got.dtype == self.query.dtype
        assert (got.double() - self.dense()).abs().max().item() < TOLERANCE[got.dtype]


ROWS = {
    "prefill": [(23, 23)],
    "prefills": [(5, 5), (40, 40), (1, 1), (17, 17)],
    "long prefill": [(600, 600)],
    "chunk": [(30, 75)],
    "long chunk": [(530, 1900)],
    "decode": [(1, 37)],
    "first token": [(1, 1)],
    "decodes": [(1, 37), (1, 1), (1, 90), (1, 4), (1, 5), (1, 64), (1, 63)],
    "drafts": [(4, 37), (4, 60), (4, 9), (4, 4)],
    "unequal drafts": [(1, 20), (3, 21), (2, 22), (3, 40)],
    "mixed": [(1, 30), (20, 20), (1, 8), (33, 50), (3, 17), (1, 100)],
}
every_mixture = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 keys and 16 queries, so that short rows cross many."""
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 1)
    monkeypatch.setattr(latent_attention, "SCORE_BYTES", 1)


@every_mixture
def test_equals_dense(rows: Rows) -> None:
    Case(rows).check()


@every_mixture
@pytest.mark.usefixtures("small_pieces")
def test_equals_dense_in_small_pieces(rows: Rows) -> None:
    Case(rows).check()


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.usefixtures("small_pieces")
def test_block_sizes(block_size: int) -> None:
    Case(ROWS["mixed"], block_size=block_size).check()


@pytest.mark.parametrize("sizes", [(16, 8, 16, 32), (3, 2, 9, 4), (8, 2, 2, 8), (1, 2, 20, 1)])
@pytest.mark.parametrize("heads", [1, 3])
def test_head_sizes(heads: int, sizes: tuple[int, ...]) -> None:
    names = dict(zip(("nope", "rope", "value", "latent"), sizes))
    Case(ROWS["mixed"], heads=heads, **names).check()
    Case(ROWS["drafts"], heads=heads, **names).check()


@every_mixture
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(rows: Rows, dtype: torch.dtype) -> None:
    Case(rows, dtype=dtype).check()


@pytest.mark.parametrize("padding_bytes", [4, 100, 64 * 12])
def test_pages_may_be_padded(padding_bytes: int) -> None:
    Case(ROWS["mixed"], padding_bytes=padding_bytes).check()


def test_a_page_that_does_not_fit_is_refused() -> None:
    sizes: dict[str, Any] = {"block_size": 4, "latent_size": 12, "rope_size": 4}
    for page in (255, 252, 258):
        raw = torch.zeros(2, page, dtype=torch.int8)
        with pytest.raises(ConfigError, match=f"{page} bytes.*256"):
            PagedLatent.from_raw(raw, **sizes, dtype=torch.float32)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda t: (t[0], t[0] + t[1])),
        min_size=1,
        max_size=6,
    ),
    block_size=st.sampled_from([1, 3, 4, 8, 16, 32]),
    pieces=st.sampled_from([1, 1 << 12, 1 << 25]),
    seed=st.integers(0, 1000),
)
def test_any_mixture(rows: Rows, block_size: int, pieces: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "EXPANDED_BYTES", pieces)
        patch.setattr(latent_attention, "SCORE_BYTES", pieces)
        Case(rows, block_size=block_size, seed=seed).check()


def test_groups_too_large_for_one_gather() -> None:
    # 8 MiB are the rows of 32 tokens · 1,024 blocks here.
    rows = [(1, 3000), (1, 40), (1, 2900), (1, 33000), (2, 32000), (1, 32500), (1, 1)]
    Case(rows, heads=2, latent=48, rope=16, block_size=32).check()


def test_scores_beyond_the_range_of_exp_are_merged() -> None:
    """Chunks whose sums differ by hundreds in the exponent, in either order."""
    for factor in (300.0, -300.0):
        case = Case([(40, 640)], block_size=16)
        # A direction of the latent that every query of a head sees alike.
        case.latents[0][:] *= 0.1
        slope = torch.linspace(0, factor, 640)[:, None]
        case.rotated[0][:] = slope
        case.query[..., case.nope :] = 0.25
        written = torch.cat((case.latents[0], case.rotated[0]), dim=-1)
        for p in range(600):
            block = case.metadata.block_table_cpu[0, p // 16]
            case.kv.pages[int(block), p % 16] = written[p]
        case.check()


def test_padding_is_ignored() -> None:
    case = Case(ROWS["mixed"])
    want = case.run()
    padded = Case(ROWS["mixed"])
    extra = 5
    padded.query = torch.cat([padded.query, torch.full((extra, 4, 10), math.nan)])
    padded.metadata.slot_mapping = torch.cat(
        [padded.metadata.slot_mapping, torch.full((extra,), -1)]
    )
    latent, rotated = padded.new()
    latent = torch.cat([latent, torch.full((extra, 12), math.nan)])
    rotated = torch.cat([rotated, torch.full((extra, 4), math.nan)])
    concat_and_cache_mla(latent, rotated, padded.kv, padded.metadata)
    got = mla_attention(padded.query, padded.kv, padded.up, padded.metadata, scale=SCALE)
    assert torch.equal(got[:-extra], want)


def test_padding_requests_are_ignored() -> None:
    case = Case(ROWS["decodes"])
    metadata = case.metadata
    metadata.num_reqs += 2
    last = metadata.query_start_loc_cpu[-1]
    metadata.query_start_loc_cpu = np.append(metadata.query_start_loc_cpu, [last, last])
    metadata.seq_lens_cpu = np.append(metadata.seq_lens_cpu, [0, 0])
    minus = np.full((2, metadata.block_table_cpu.shape[1]), -1, np.int32)
    metadata.block_table_cpu = np.concatenate([metadata.block_table_cpu, minus])
    case.check()


def test_rows_do_not_influence_each_other() -> None:
    case = Case(ROWS["mixed"])
    together = case.run().split(case.query_lens)
    for i, row in enumerate(ROWS["mixed"]):
        alone = Case([row], seed=7)
        alone.latents, alone.rotated, alone.up = [case.latents[i]], [case.rotated[i]], case.up
        alone.query = case.query.split(case.query_lens)[i]
        table = alone.metadata.block_table_cpu[0]
        for p in range(row[1] - row[0]):
            alone.kv.pages[int(table[p // 4]), p % 4] = torch.cat(
                (case.latents[i][p], case.rotated[i][p])
            )
        assert torch.allclose(alone.run(), together[i], atol=1e-5)


def test_writes_each_token_to_its_slot_and_nothing_else() -> None:
    case = Case([(6, 6), (3, 10)])
    before = case.kv.pages.clone()
    case.run()
    untouched = torch.ones_like(case.kv.pages, dtype=torch.bool)
    for slot, latent, rotated in zip(case.metadata.slot_mapping.tolist(), *case.new()):
        block, offset = divmod(slot, case.block_size)
        assert torch.equal(case.kv.pages[block, offset], torch.cat((latent, rotated)))
        untouched[block, offset] = False
    assert torch.equal(case.kv.pages[untouched].isnan(), before[untouched].isnan())


def test_negative_slots_and_rows_beyond_the_slots_are_skipped() -> None:
    case = Case([(4, 4)])
    case.metadata.slot_mapping = torch.tensor([5, -1, 2])
    concat_and_cache_mla(torch.randn(4, 12), torch.randn(4, 4), case.kv, case.metadata)
    written = ~case.kv.pages.isnan().any(-1)
    assert written.flatten().nonzero().flatten().tolist() == [2, 5]


def test_takes_slots_from_the_host_where_given() -> None:
    case = Case([(2, 2)])
    case.metadata.slot_mapping_cpu = np.array([0, 1])
    case.metadata.slot_mapping = torch.tensor([9, 9])
    latent = torch.randn(2, 12)
    concat_and_cache_mla(latent, torch.randn(2, 4), case.kv, case.metadata)
    assert torch.equal(case.kv.pages[0, :2, :12], latent)


class LargestTensor(TorchDispatchMode):
    """Notes the bytes behind the largest tensor that any operator returns, arguments apart."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                if storage.data_ptr() not in given:
                    self.nbytes = max(self.nbytes, storage.nbytes())
        return result


@pytest.mark.parametrize(
    ("row", "heads"), [((1024, 1024), 64), ((128, 4096), 64)], ids=["prompt", "chunk"]
)
@pytest.mark.parametrize("kernel", [attention_parts._streamed, attention_parts._in_float32])
def test_a_long_prompt_is_never_expanded_whole(
    row: tuple[int, int], heads: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither all keys nor all scores ever exist."""
    monkeypatch.setattr(attention_parts, "_streamed", kernel)
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 1 << 20)
    monkeypatch.setattr(latent_attention, "SCORE_BYTES", 1 << 20)
    case = Case([row], heads=heads, nope=24, value=8, rope=8, latent=16, block_size=32)
    with LargestTensor() as largest:
        case.run()
    queries, keys = row
    of_queries = queries * heads * 32 * 4
    assert largest.nbytes <= max(2 << 20, of_queries)
    if keys > queries:
        assert largest.nbytes < keys * heads * 32 * 4 / 8
    assert largest.nbytes < queries * keys * heads * 4 / 8


@every_mixture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_pieces")
def test_other_devices_compute_the_same(
    rows: Rows, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no kernel that streams and tells the log-sum-exps."""
    monkeypatch.setattr(attention_parts, "_streamed", attention_parts._in_float32)
    Case(rows, dtype=dtype).check()
