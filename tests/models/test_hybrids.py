"""Jamba and Qwen3-Next read config.json as transformers does; what cannot be honoured is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models import jamba, qwen3_next
from jubako.models.load import build_model

from .harness import from_transformers, hf_config_of, make_config
from .tiny import reference_model

FAMILIES: dict[str, tuple[Any, type]] = {
    "jamba": (jamba.ModelArgs.from_config, transformers.JambaConfig),
    "qwen3 next": (qwen3_next.ModelArgs.from_config, transformers.Qwen3NextConfig),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "partial",
    [
        {},
        {"num_hidden_layers": 11, "hidden_size": 96, "num_attention_heads": 6},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
    ],
)
def test_what_is_left_out_has_transformers_default(family: str, partial: dict[str, Any]) -> None:
    read, config_class = FAMILIES[family]
    assert read(partial) == read(config_class(**partial).to_dict())


def test_jamba_layers_follow_from_periods() -> None:
    config = transformers.JambaConfig(
        num_hidden_layers=9,
        attn_layer_period=4,
        attn_layer_offset=3,
        expert_layer_period=3,
        expert_layer_offset=0,
    )
    args = jamba.ModelArgs.from_config(config.to_dict())
    assert args.attention_layers == [kind == "attention" for kind in config.layers_block_type]
    assert args.moe_layers == [count > 1 for count in config.layers_num_experts]


def test_qwen3_next_layers_follow_from_an_interval() -> None:
    config = transformers.Qwen3NextConfig(num_hidden_layers=7, full_attention_interval=3)
    partial = {"num_hidden_layers": 7, "full_attention_interval": 3}
    assert qwen3_next.ModelArgs.from_config(partial).layer_types == config.layer_types


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("jamba", {"attn_layer_offset": 8}),
        ("jamba", {"expert_layer_offset": 2}),
        ("jamba", {"hidden_act": "gelu"}),
        ("jamba", {"mamba_dt_rank": "half"}),
        ("jamba", {"mamba_d_conv": 1}),
        ("qwen3 next", {"hidden_act": "gelu"}),
        ("qwen3 next", {"layer_types": ["linear_attention"]}),
        ("qwen3 next", {"layer_types": ["sliding_attention"] * 48}),
        ("qwen3 next", {"linear_num_value_heads": 24}),
        ("qwen3 next", {"linear_conv_kernel_dim": 1}),
        ("qwen3 next", {"mlp_only_layers": "all"}),
    ],
)
def test_what_cannot_be_honoured_is_named(family: str, entries: dict[str, Any]) -> None:
    with pytest.raises((UnsupportedModelError, CheckpointError), match=next(iter(entries))):
        FAMILIES[family][0](entries)


def test_layers_that_guess_ahead_are_left_out() -> None:
    reference = reference_model("qwen3 next")
    model: Any = build_model(make_config(hf_config_of(reference)), torch.device("cpu"))
    guess = {"mtp.fc.weight": torch.zeros(3), "mtp.layers.0.mlp.gate.weight": torch.zeros(3)}
    used = model.load_weights({**guess, **reference.state_dict()}.items())
    assert used == set(reference.state_dict())


def test_mixed_rows_are_sorted_out() -> None:
    """Queries of all heads stand together, before the gates, though a checkpoint mixes them."""
    reference = reference_model("qwen3 next tied, biased, dense layers")
    model = from_transformers(reference)
    theirs = reference.model.layers[0].self_attn.q_proj
    heads, size = reference.config.num_attention_heads, reference.config.head_dim
    ours = model.model.layers[0].self_attn.qkv_proj
    for kind in ("weight", "bias"):
        by_head = getattr(theirs, kind).detach().unflatten(0, (heads, 2, size))
        whole = getattr(ours, kind)
        assert torch.equal(whole[: heads * size], by_head[:, 0].flatten(0, 1))
        assert torch.equal(whole[-heads * size :], by_head[:, 1].flatten(0, 1))
