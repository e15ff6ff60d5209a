"""Models with experts: names on the hub, settings that show, configurations that are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jubako.errors import CheckpointError, JubakoError, UnsupportedModelError
from jubako.kv_cache import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from jubako.models.load import build_model, cache_layers

from .harness import PagedRunner, from_transformers, hf_config_of, make_config
from .tiny import reference_model

CPU = torch.device("cpu")


@cache
def reference(name: str) -> Any:
    return reference_model(name)


def logits(hf_config: dict[str, Any], weights: Any, length: int = 60) -> torch.Tensor:
    model: Any = build_model(make_config(hf_config), CPU)
    model.load_weights(weights)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 128, (length,), generator=generator).tolist()
    return PagedRunner(model, block_size=4).step({0: tokens})[0]


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe", "gpt-oss", "llama4"])
def test_names_of_the_hub(name: str, tmp_path: Any) -> None:
    reference(name).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    if name in ("mixtral", "qwen3 moe"):
        assert any(".experts.4." in tensor for tensor in saved), "one tensor an expert"
    model: Any = build_model(make_config(hf_config_of(reference(name))), CPU)
    assert model.load_weights(saved.items()) == saved.keys()
    want = dict(from_transformers(reference(name)).named_parameters())
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter, want[path]), path


def test_the_text_part_of_a_multimodal_llama4() -> None:
    config = hf_config_of(reference("llama4"))
    text = {k: v for k, v in config.items() if k != "architectures"}
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    weights = reference("llama4").state_dict()
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    renamed["vision_model.patch_embedding.linear.weight"] = torch.zeros(3)
    renamed["multi_modal_projector.linear_1.weight"] = torch.zeros(3)
    assert torch.equal(logits(whole, renamed.items()), logits(config, weights.items()))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama4", {"attention_chunk_size": 20}),
        ("llama4", {"layer_types": ["full_attention"] * 4}),
        ("llama4", {"no_rope_layers": [1, 1, 1, 1]}),
        ("llama4", {"attn_temperature_tuning": False}),
        ("llama4", {"floor_scale": 6}),
        ("llama4", {"attn_scale": 0.2}),
        ("llama4", {"use_qk_norm": False}),
        ("llama4", {"num_experts_per_tok": 2}),
        ("gpt-oss", {"sliding_window": 11}),
        ("gpt-oss", {"layer_types": ["full_attention"] * 4}),
        ("gpt-oss", {"swiglu_limit": 1.0}),
        ("gpt-oss", {"swiglu_alpha": 1.5}),
        ("gpt-oss", {"num_experts_per_tok": 1}),
        ("gpt-oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0}}),
        ("qwen3 moe", {"norm_topk_prob": False}),
        ("qwen3 moe", {"use_sliding_window": True, "sliding_window": 10}),
        ("mixtral", {"sliding_window": 10}),
    ],
)
def test_the_setting_matters(name: str, change: dict[str, Any]) -> None:
    """A guard of the exactness tests: their models would show a setting that is ignored."""
    config = hf_config_of(reference(name))
    weights = reference(name).state_dict()
    changed = logits({**config, **change}, weights.items())
    assert (changed - logits(config, weights.items())).abs().max() > 1e-2


def test_sinks_matter() -> None:
    config = hf_config_of(reference("gpt-oss"))
    weights = reference("gpt-oss").state_dict()
    want = logits(config, weights.items())
    low = {n: t - 50 if n.endswith("sinks") else t for n, t in weights.items()}
    assert (logits(config, low.items()) - want).abs().max() > 1e-2


def test_what_is_cached() -> None:
    layers = cache_layers(from_transformers(reference("llama4"))).values()
    specs = [layer.get_kv_cache_spec(8) for layer in layers]
    assert [type(s) for s in specs] == [ChunkedLocalAttentionSpec] * 3 + [FullAttentionSpec]
    assert specs[0].attention_chunk_size == 16
    layers = cache_layers(from_transformers(reference("gpt-oss"))).values()
    kinds = [type(layer.get_kv_cache_spec(8)) for layer in layers]
    assert kinds == [SlidingWindowSpec, FullAttentionSpec] * 2


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, CheckpointError, "6.*only 5 experts"),
        ("mixtral", {"num_local_experts": 0}, CheckpointError, "num_local_experts"),
        ("mixtral", {"hidden_act": "relu6"}, UnsupportedModelError, "relu6"),
        ("qwen3 moe", {"mlp_only_layers": "all"}, CheckpointError, "mlp_only_layers"),
        ("qwen3 moe", {"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 4}, UnsupportedModelError, "chunked"),
        ("gpt-oss", {"swiglu_limit": "high"}, CheckpointError, "swiglu_limit"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, UnsupportedModelError, "sliding"),
        ("llama4", {"layer_types": ["full_attention"]}, CheckpointError, "layer_types.*4"),
        ("llama4", {"no_rope_layers": [1]}, CheckpointError, "no_rope_layers.*4"),
        ("llama4", {"moe_layers": [True]}, CheckpointError, "moe_layers"),
        ("llama4", {"attention_chunk_size": -1}, CheckpointError, "attention_chunk_size"),
    ],
)
def test_what_cannot_be_is_refused(
    name: str, change: dict[str, Any], error: type[JubakoError], message: str
) -> None:
    config = {**hf_config_of(reference(name)), **change}
    with pytest.raises(error, match=message):
        build_model(make_config(config), CPU)
