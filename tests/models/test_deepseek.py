"""What is special about DeepSeek: settings it refuses, layers it does not use, its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.kv_cache import MLAAttentionSpec
from jubako.layers.mla import MLAAttention
from jubako.models.deepseek import DEFAULTS, ModelArgs
from jubako.models.load import build_model, cache_layers

from .harness import PagedRunner, from_transformers, hf_config_of, make_config
from .tiny import reference_model

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (V2, {"norm_topk_prob": True}, "norm_topk_prob True"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'.*group_limited_greedy"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'.*noaux_tc"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V3, {"n_group": 7}, "4 of 7 groups"),
        (V3, {"topk_group": 9}, "9 of 8 groups"),
        (V3, {"num_experts_per_tok": 129}, "129 of 256 experts"),
        (V3, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (V3, {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "no factor"),
    ],
)
def test_settings_that_are_refused(
    architecture: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _ = ModelArgs.from_config(settings, architecture).attention_scale


def test_a_setting_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(CheckpointError, match="kv_lora_rank"):
        ModelArgs.from_config({"kv_lora_rank": "512"}, V3)


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    import transformers

    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    full = config_class().to_dict()
    if architecture == V2:
        full["num_experts_per_tok"] = 1  # it has none, and no model without one
    assert ModelArgs.from_config({}, architecture) == ModelArgs.from_config(full, architecture)


@pytest.mark.parametrize("name", ["deepseek v2 lite", "deepseek v3"])
def test_a_token_takes_one_latent_and_one_rotated_key(name: str) -> None:
    config = make_config(hf_config_of(reference_model(name)))
    layers = cache_layers(build_model(config, torch.device("cpu")))
    assert list(layers) == [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    for layer in layers.values():
        spec = layer.get_kv_cache_spec(8)
        assert isinstance(spec, MLAAttentionSpec)
        assert spec.page_size_bytes == 8 * (28 + 16) * 4


def test_layers_that_predict_further_tokens_are_not_read() -> None:
    reference = reference_model("deepseek v3")
    hf_config = {**hf_config_of(reference), "num_nextn_predict_layers": 1}
    weights = {**reference.state_dict(), "model.layers.4.eh_proj.weight": torch.zeros(3)}
    model: Any = build_model(make_config(hf_config), torch.device("cpu"))
    assert "model.layers.4.eh_proj.weight" not in model.load_weights(weights.items())
    weights["model.layers.5.eh_proj.weight"] = torch.zeros(3)
    model = build_model(make_config(hf_config), torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.5\.eh_proj"):
        model.load_weights(weights.items())


@pytest.mark.parametrize("name", ["deepseek v2 lite", "deepseek v3"])
@pytest.mark.parametrize("fault", ["scale", "nope", "kept"])
def test_faults_would_show(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard of the exactness tests: the tiny models notice what could go wrong in attention."""
    reference = reference_model(name)
    model = from_transformers(reference)
    tokens = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    want = PagedRunner(model).step({0: tokens})[0]
    forward = MLAAttention.forward

    def faulty(self: Any, q: torch.Tensor, latent: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if fault == "scale":
            return forward(self, q * 1.1, latent, key)
        if fault == "nope":
            return forward(self, q, latent, key.roll(1, 0))
        return forward(self, q, latent.roll(1, 0), key)

    monkeypatch.setattr(MLAAttention, "forward", faulty)
    assert (PagedRunner(model).step({0: tokens})[0] - want).abs().max() > 1e-2


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("name", ["deepseek v2 lite", "deepseek v3"])
def test_block_sizes(name: str, block_size: int) -> None:
    reference = reference_model(name)
    runner = PagedRunner(from_transformers(reference), block_size=block_size)
    tokens = torch.randint(3, 128, (70,), generator=torch.Generator().manual_seed(0))
    parts, start = [], 0
    for size in (33, 1, 5, 20, 11):
        parts.append(runner.step({0: tokens[start : start + size].tolist()})[0])
        start += size
    with torch.no_grad():
        want = reference(tokens[None]).logits[0]
    assert (torch.cat(parts) - want).abs().max() < 1e-4
