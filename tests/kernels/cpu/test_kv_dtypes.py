"""Pages in another dtype than the model's: what is stored, and that attention reads just that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jubako.errors import ConfigError
from jubako.kernels.cpu.kernels import CpuKernels
from jubako.kernels.cpu.library import Pool
from jubako.kernels.paged_kv import LARGEST, PagedKV, scale_bytes
from jubako.kernels.reference.kernels import ReferenceKernels
from jubako.kv_cache.specs import FullAttentionSpec, SlidingWindowSpec

from ..paging import make_metadata, scrambled_tables
from ..test_attention import TOLERANCE, Case

KV_DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16]
ROWS = [(1, 300), (5, 40), (70, 130), (33, 33)]


class KvCase(Case):
    """A case whose pages are of `kv_dtype`, written by the kernels that read them."""

    def __init__(self, kernels: Any, kv_dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(ROWS, head_size=48, block_size=8, **settings)
        self.kernels = kernels
        blocks, heads, _, B, D = self.kv.pages.shape
        self.tables, _ = scrambled_tables(self.seq_lens, B, np.random.default_rng(0))
        self.raw = torch.full(
            (blocks, 2 * heads * B * (D * kv_dtype.itemsize + scale_bytes(kv_dtype))),
            127,
            dtype=torch.int8,
        )
        self.kv = PagedKV.from_raw(
            self.raw, num_kv_heads=heads, block_size=B, head_size=D, dtype=kv_dtype
        )
        # Scales differ a lot, and one row is all zeros.
        torch.manual_seed(0)
        for xs in (self.keys, self.values):
            for x in xs:
                x *= (torch.rand(len(x), heads, 1) * 3).exp().to(x.dtype)
                x[7] = 0
        self.key, self.value = torch.cat(self.keys), torch.cat(self.values)
        whole = make_metadata(self.seq_lens, self.seq_lens, self.tables, B)
        whole.slot_mapping_cpu = whole.slot_mapping.numpy()
        kernels.reshape_and_cache(self.key, self.value, self.kv, whole)

    def run(self, scale: float = 0.05, **rules: Any) -> torch.Tensor:
        new = [slice(s - q, s) for q, s in zip(self.query_lens, self.seq_lens)]
        key = torch.cat([k[part] for k, part in zip(self.keys, new)])
        value = torch.cat([v[part] for v, part in zip(self.values, new)])
        return self.kernels.paged_attention(
            self.query,
            key,
            value,
            self.kv,
            self.metadata,
            scale=scale,
            sliding_window=rules.get("window"),
            logits_soft_cap=rules.get("cap"),
        )

    def see_what_is_stored(self) -> None:
        """The dense answer is to be that of the stored numbers."""
        B = self.kv.block_size
        scales = self.kv.scales
        if scales is not None:
            scales = scales.view(len(self.kv.pages), -1, 2, B)
        for r, table in enumerate(self.tables):
            for p in range(self.seq_lens[r]):
                row = self.kv.pages[table[p // B], :, :, p % B].float()
                if scales is not None:
                    row = row * scales[table[p // B], :, :, p % B, None]
                self.keys[r][p], self.values[r][p] = row[:, 0], row[:, 1]


@pytest.fixture
def native(native_pool: Pool) -> CpuKernels:
    kernels = CpuKernels()
    kernels.pool = native_pool
    return kernels


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_write_the_same(native: CpuKernels, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    got, want = (KvCase(k, kv_dtype, dtype=dtype) for k in (native, ReferenceKernels()))
    assert torch.equal(got.raw, want.raw)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
def test_what_is_stored_is_near_what_was_given(kv_dtype: torch.dtype) -> None:
    case = KvCase(ReferenceKernels(), kv_dtype)
    given = [x.clone() for x in (*case.keys, *case.values)]
    case.see_what_is_stored()
    for x, stored in zip(given, (*case.keys, *case.values)):
        largest = x.abs().amax(-1, keepdim=True)
        # int8: half a step. fp8: 4 bits of precision, and a step of 2^-9 near zero.
        within = largest / 254 if kv_dtype == torch.int8 else x.abs() / 16 + largest / 448 / 1024
        assert ((x - stored).abs() <= within * 1.0001).all()
        assert not stored[7].any()


RULES: list[dict[str, Any]] = [{}, {"window": 33}, {"cap": 4.0}]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_what_is_stored(
    native: CpuKernels, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    for kernels in (native, ReferenceKernels()):
        case = KvCase(kernels, kv_dtype, dtype=dtype)
        outputs = [case.run(**rules) for rules in RULES]
        for xs in (case.keys, case.values):
            xs[:] = [x.float() for x in xs]
        case.see_what_is_stored()
        largest = max(x.abs().max().item() for x in case.values)
        for got, rules in zip(outputs, RULES):
            error = (got.double() - case.dense(scale=0.05, **rules)).abs().max().item()
            assert error < TOLERANCE[dtype] * largest, (kernels.name, rules)


def test_no_aligned_place_for_scales() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype=auto"):
        PagedKV.from_raw(
            torch.zeros(2, 100, dtype=torch.int8),
            num_kv_heads=1,
            block_size=1,
            head_size=6,
            dtype=torch.int8,
        )


def test_scales_count_in_a_page() -> None:
    shape: dict[str, Any] = {"block_size": 32, "num_kv_heads": 3, "head_size": 64}
    for spec in (
        FullAttentionSpec(**shape, dtype="int8", scale_bytes=4),
        SlidingWindowSpec(**shape, dtype="int8", scale_bytes=4, sliding_window=5),
    ):
        assert spec.page_size_bytes == 2 * 3 * 32 * (64 + 4)
        raw = torch.zeros(2, spec.page_size_bytes, dtype=torch.int8)
        kv = PagedKV.from_raw(raw, **shape, dtype=torch.int8)
        assert kv.slabs_per_block == 6
