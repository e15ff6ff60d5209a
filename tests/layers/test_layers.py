"""What single layers promise beside the numbers that the model tests check."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jubako.config import JubakoConfig
from jubako.errors import ConfigError, UnsupportedModelError
from jubako.kv_cache.specs import FullAttentionSpec, SlidingWindowSpec
from jubako.layers.activation import gated_activation
from jubako.layers.attention import Attention
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.forward_context import get_forward_context, set_forward_context
from jubako.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from jubako.layers.norm import LayerNorm, RMSNorm
from jubako.layers.rotary import QKNormRope
from tests.kernels.paging import make_metadata


def attention(dtype: str = "float32", window: int | None = None, **options: int) -> Attention:
    config = JubakoConfig().replace(model_config={"dtype": dtype})
    sizes = {"num_heads": 4, "head_size": 8, "num_kv_heads": 2, **options}
    return Attention(**sizes, scale=0.5, config=config, layer_name="a", sliding_window=window)


class TestForwardContext:
    def test_contexts_nest_and_end(self) -> None:
        with set_forward_context(None):
            with set_forward_context({}):
                assert get_forward_context().attn_metadata == {}
            assert get_forward_context().attn_metadata is None

    def test_ends_after_an_error(self) -> None:
        with set_forward_context(None):
            with pytest.raises(KeyError), set_forward_context({}):
                raise KeyError
            assert get_forward_context().attn_metadata is None

    def test_threads_do_not_see_each_others(self) -> None:
        with set_forward_context({}), ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(get_forward_context)
            assert isinstance(elsewhere.exception(), AssertionError)

    def test_a_model_outside_of_it_is_a_defect(self) -> None:
        with pytest.raises(AssertionError, match="set_forward_context"):
            get_forward_context()


class TestAttention:
    def test_profiling_run_gives_zeros_and_writes_nothing(self) -> None:
        layer = attention()
        q, kv = torch.ones(3, 4, 8), torch.ones(3, 2, 8)
        with set_forward_context(None):
            out = layer(q, kv, kv)
        assert out.shape == (3, 32)
        assert not out.any()

    def test_spec_of_a_full_layer(self) -> None:
        spec = attention("bfloat16").get_kv_cache_spec(16)
        assert spec == FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16"
        )

    def test_spec_of_a_window_layer(self) -> None:
        spec = attention(window=5).get_kv_cache_spec(4)
        assert spec == SlidingWindowSpec(
            block_size=4, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=5
        )

    def test_page_layout_is_blocks_heads_kv_tokens(self) -> None:
        layer = attention("bfloat16")
        page = layer.get_kv_cache_spec(4).page_size_bytes
        raw = torch.zeros(3, page, dtype=torch.int8)
        layer.bind_kv_cache(raw)
        k, v = torch.rand(2, 2, 8).bfloat16(), torch.rand(2, 2, 8).bfloat16()
        metadata = make_metadata([2], [2], [[1]], block_size=4)
        with set_forward_context({"a": metadata}):
            layer(torch.rand(2, 4, 8).bfloat16(), k, v)
        pages = raw.view(torch.bfloat16).view(3, 2, 2, 4, 8)
        assert torch.equal(pages[1, :, 0, :2], k.transpose(0, 1))
        assert torch.equal(pages[1, :, 1, :2], v.transpose(0, 1))
        assert not pages[1, :, :, 2:].any()
        assert not pages[[0, 2]].any()

    def test_block_size_follows_from_the_page(self) -> None:
        """The KV configuration may give a layer larger blocks than it was asked about."""
        layer = attention()
        page = layer.get_kv_cache_spec(4).page_size_bytes
        layer.bind_kv_cache(torch.zeros(2, 2 * page, dtype=torch.int8))
        assert layer.kv is not None
        assert layer.kv.block_size == 8

    def test_padded_pages_need_the_block_size(self) -> None:
        layer = attention()
        page = layer.get_kv_cache_spec(4).page_size_bytes
        layer.bind_kv_cache(torch.zeros(2, page + page // 4, dtype=torch.int8), block_size=4)
        assert layer.kv is not None
        assert layer.kv.pages.shape == (2, 2, 2, 4, 8)

    def test_heads_must_divide(self) -> None:
        with pytest.raises(ConfigError, match=r"4 query heads .* 3 KV heads"):
            attention(num_kv_heads=3)


class TestWeightTargets:
    def test_merged_parts_lie_below_each_other(self) -> None:
        layer = MergedColumnParallelLinear(3, {"gate_proj": 2, "up_proj": 5}, bias=True)
        targets = dict(layer.weight_targets("gate_up_proj"))
        assert {name: t.shape for name, t in targets.items()} == {
            "gate_proj.weight": (2, 3),
            "gate_proj.bias": (2,),
            "up_proj.weight": (5, 3),
            "up_proj.bias": (5,),
            "gate_up_proj.weight": (7, 3),
            "gate_up_proj.bias": (7,),
        }
        assert targets["gate_up_proj.bias"].parts == ("gate_proj.bias", "up_proj.bias")
        gate, up = torch.rand(2, 3), torch.rand(5, 3)
        targets["up_proj.weight"].load(up)
        targets["gate_proj.weight"].load(gate)
        assert torch.equal(layer.weight, torch.cat((gate, up)))

    def test_qkv(self) -> None:
        layer = QKVParallelLinear(6, 4, num_heads=3, num_kv_heads=1)
        shapes = {name: t.shape for name, t in layer.weight_targets("qkv_proj")}
        assert shapes == {
            "q_proj.weight": (12, 6),
            "k_proj.weight": (4, 6),
            "v_proj.weight": (4, 6),
            "qkv_proj.weight": (20, 6),
        }

    def test_layer_norm_with_and_without_bias(self) -> None:
        for bias, names in ((True, ["norm.weight", "norm.bias"]), (False, ["norm.weight"])):
            layer = LayerNorm(2, 1e-5, bias=bias)
            assert [n for n, _ in layer.weight_targets("norm")] == names

    def test_plain_layers_keep_their_name(self) -> None:
        assert [n for n, _ in RowParallelLinear(2, 3).weight_targets("o_proj")] == ["o_proj.weight"]
        assert [n for n, _ in RMSNorm(2, 1e-6).weight_targets("norm")] == ["norm.weight"]

    def test_norm_offset_is_added_in_float32(self) -> None:
        layer = RMSNorm(1, 1e-6, weight_offset=1.0)
        weight = torch.tensor([0.0078], dtype=torch.bfloat16)
        dict(layer.weight_targets("norm"))["norm.weight"].load(weight)
        assert layer.weight.item() == 1 + weight.item()

    def test_head_norms_are_repeated_for_each_head(self) -> None:
        layer = QKNormRope(3, 2, 4, 1e-6)
        targets = dict(layer.weight_targets("qk_norm_rope"))
        q, k = torch.rand(4), torch.rand(4)
        targets["q_norm.weight"].load(q)
        targets["k_norm.weight"].load(k)
        assert torch.equal(layer.weight, torch.stack((q, q, q, k, k)))


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'relu6'"):
        gated_activation("relu6")


def test_scaled_logits() -> None:
    embedding = VocabEmbedding(5, 3)
    embedding.weight.data.normal_()
    hidden = torch.randn(2, 3)
    got = LMHead(5, 3, embedding, soft_cap=2.0, scale=0.25)(hidden)
    torch.testing.assert_close(got, LMHead(5, 3, embedding, soft_cap=2.0)(hidden) * 0.25)
    got = LMHead(5, 3, embedding, scale=0.25)(hidden)
    torch.testing.assert_close(got, hidden @ embedding.weight.T * 0.25)


def test_soft_capped_logits() -> None:
    embedding = VocabEmbedding(5, 3)
    embedding.weight.data.normal_()
    head = LMHead(5, 3, tied_to=embedding, soft_cap=2.0)
    hidden = torch.randn(4, 3) * 5
    want = 2 * torch.tanh(hidden @ embedding.weight.T / 2)
    torch.testing.assert_close(head(hidden), want)
    assert not list(head.weight_targets("lm_head"))
