"""Every tensor of a checkpoint goes to its place once, and what does not fit is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models.load import build_model, cache_layers, load_model
from jubako.models.registry import get_model_class, supported_architectures

from .harness import PagedRunner, from_transformers, hf_config_of, make_config
from .tiny import CONFIGS, MIXED, SIZES, reference_model

Weights = dict[str, torch.Tensor]

KEPT_IN_FLOAT32 = {"a_log", "d", "dt_bias", "correction_bias"}
"""Parameters that are few, and whose errors add up."""

every_model = pytest.mark.parametrize("name", CONFIGS)


def empty_model(reference: Any, dtype: str = "float32") -> Any:
    return build_model(make_config(hf_config_of(reference), dtype), torch.device("cpu"))


def parameters(model: Any) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@every_model
def test_order_and_prefix_do_not_matter(name: str) -> None:
    reference = reference_model(name)
    want = parameters(from_transformers(reference))
    model = empty_model(reference)
    weights = [(n.removeprefix("model."), t) for n, t in reference.state_dict().items()]
    used = model.load_weights(reversed(weights))
    assert_equal(parameters(model), want)
    tied = reference.config.tie_word_embeddings
    assert used == {n for n, _ in weights if not (tied and n == "lm_head.weight")}


@every_model
def test_nothing_is_held_twice(name: str) -> None:
    """A parameter is the memory it had, or becomes the tensor that fills it."""
    reference = reference_model(name)
    model = empty_model(reference)
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    weights = reference.state_dict()
    given = {tensor.data_ptr() for tensor in weights.values()}
    model.load_weights(weights.items())
    for path, parameter in model.named_parameters():
        if "embed_tokens" in path or "down_proj" in path:
            assert parameter.data_ptr() in given
        else:
            assert parameter.data_ptr() in {before[path], *given}


def test_a_part_of_a_larger_tensor_is_copied() -> None:
    """Else the larger one would live as long as the model."""
    reference = reference_model("llama")
    model = empty_model(reference)
    weights = reference.state_dict()
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat((embedding, embedding))[: len(embedding)]
    model.load_weights(weights.items())
    parameter = model.model.embed_tokens.weight
    assert torch.equal(parameter, embedding)
    assert parameter.untyped_storage().nbytes() == parameter.nbytes


@every_model
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_have_the_dtype_and_no_gradient(name: str, dtype: str) -> None:
    model = empty_model(reference_model(name), dtype)
    for path, parameter in model.named_parameters():
        assert not parameter.requires_grad
        exact = "norm" in path or path.rpartition(".")[2] in KEPT_IN_FLOAT32
        assert parameter.dtype is (torch.float32 if exact else getattr(torch, dtype)), path
    assert not model.training


@every_model
def test_every_tensor_must_be_there_and_have_its_shape(name: str) -> None:
    """One of each kind; below are the messages in full, of one model."""
    reference = reference_model(name)
    weights = reference.state_dict()
    if reference.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    model = empty_model(reference)
    of_each_kind = {re.sub(r"\d+", "#", tensor): tensor for tensor in weights}
    for tensor in of_each_kind.values():
        without = {n: t for n, t in weights.items() if n != tensor}
        with pytest.raises(CheckpointError, match="lacks the tensor"):
            model.load_weights(without.items())
        with pytest.raises(CheckpointError, match=r"has shape \[1, 3\]"):
            model.load_weights([(tensor, torch.zeros(1, 3))])
    extra = f"{tensor}_more"
    with pytest.raises(UnsupportedModelError, match=extra.rpartition(".")[2]):
        model.load_weights({**weights, extra: torch.ones(1)}.items())


def test_a_missing_tensor_is_named() -> None:
    reference = reference_model("qwen2")
    weights = reference.state_dict()
    del weights["model.layers.2.self_attn.k_proj.bias"]
    with pytest.raises(CheckpointError, match=r"lacks.*model\.layers\.2\.self_attn\.k_proj\.bias"):
        empty_model(reference).load_weights(weights.items())
    del weights["model.norm.weight"]
    with pytest.raises(CheckpointError, match="and 1 more"):
        empty_model(reference).load_weights(weights.items())


@pytest.mark.parametrize(
    "extra",
    ["model.layers.4.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"],
)
def test_an_extra_tensor_is_named(extra: str) -> None:
    reference = reference_model("llama")
    weights = {**reference.state_dict(), extra: torch.zeros(1)}
    with pytest.raises(UnsupportedModelError, match=extra.replace(".", r"\.")):
        empty_model(reference).load_weights(weights.items())


def test_a_bias_of_zeros_may_be_extra_and_no_other() -> None:
    reference = reference_model("llama")
    name = "model.layers.0.self_attn.q_proj"
    bias = torch.zeros(len(reference.state_dict()[f"{name}.weight"]))
    weights = {**reference.state_dict(), f"{name}.bias": bias}
    assert f"{name}.bias" not in empty_model(reference).load_weights(weights.items())
    bias[-1] = 1e-9
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias"):
        empty_model(reference).load_weights(weights.items())


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("model.layers.1.self_attn.k_proj.weight", [64, 72]),
        ("model.layers.1.self_attn.q_norm.weight", [32]),
        ("model.embed_tokens.weight", [128, 72]),
        ("model.norm.weight", [72]),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(tensor: str, shape: list[int]) -> None:
    reference = reference_model("gemma3")
    weights = reference.state_dict()
    weights[tensor] = torch.zeros(3)
    with pytest.raises(CheckpointError) as error:
        empty_model(reference).load_weights(weights.items())
    assert tensor in str(error.value)
    assert str(shape) in str(error.value)
    assert "[3]" in str(error.value)


def test_a_tensor_may_not_come_twice() -> None:
    reference = reference_model("llama")
    weights = list(reference.state_dict().items())
    with pytest.raises(CheckpointError, match="twice"):
        empty_model(reference).load_weights([*weights, weights[3]])


def joined(weights: Weights) -> Weights:
    """As checkpoints that have projections of one input in one tensor."""
    out = dict(weights)
    for name in weights:
        for first, others, whole in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if f".{first}." in name:
                names = [name, *(name.replace(first, other) for other in others)]
                out[name.replace(first, whole)] = torch.cat([out.pop(n) for n in names])
    return out


@pytest.mark.parametrize("name", ["llama", "llama tied, biased, llama3 rope", "qwen2", "gemma2"])
def test_projections_may_be_in_one_tensor(name: str) -> None:
    reference = reference_model(name)
    weights = joined(reference.state_dict())
    model = empty_model(reference)
    model.load_weights(weights.items())
    assert_equal(parameters(model), parameters(from_transformers(reference)))
    weights["model.layers.1.self_attn.qkv_proj.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.qkv_proj.*has shape \[3\]"):
        empty_model(reference).load_weights(weights.items())
    del weights["model.layers.1.self_attn.qkv_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj.weight' and 2 more"):
        empty_model(reference).load_weights(weights.items())


def test_projections_may_be_apart() -> None:
    reference = reference_model("phi3")
    weights: Weights = {}
    for name, tensor in reference.state_dict().items():
        if ".qkv_proj." in name:
            for part, rows in zip(("q_proj", "k_proj", "v_proj"), tensor.split((64, 32, 32))):
                weights[name.replace("qkv_proj", part)] = rows
        elif ".gate_up_proj." in name:
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2)):
                weights[name.replace("gate_up_proj", part)] = rows
        else:
            weights[name] = tensor
    model = empty_model(reference)
    model.load_weights(weights.items())
    assert_equal(parameters(model), parameters(from_transformers(reference)))


@pytest.mark.parametrize("first", ["whole", "parts"])
def test_projections_may_not_come_both_ways(first: str) -> None:
    weights = reference_model("llama").state_dict()
    both = [joined(weights), weights]
    pairs = [pair for form in (both if first == "whole" else both[::-1]) for pair in form.items()]
    seen: set[str] = set()
    unique = [pair for pair in pairs if not (pair[0] in seen or seen.add(pair[0]))]  # type: ignore[func-returns-value]
    with pytest.raises(CheckpointError, match=r"twice"):
        empty_model(reference_model("llama")).load_weights(unique)


def test_rotary_caches_are_ignored() -> None:
    reference = reference_model("llama")
    caches = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.cos_cached": torch.zeros(8),
        "model.rotary_emb.sin_cached": torch.zeros(8),
    }
    model = empty_model(reference)
    used = model.load_weights({**caches, **reference.state_dict()}.items())
    assert not used & caches.keys()


def test_a_tied_head_shares_the_embedding() -> None:
    reference = reference_model("llama tied, biased, llama3 rope")
    model = empty_model(reference)
    weights = {**reference.state_dict(), "lm_head.weight": torch.full((128, 64), float("nan"))}
    assert "lm_head.weight" not in model.load_weights(weights.items())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_an_untied_head_must_be_there() -> None:
    reference = reference_model("llama")
    weights = reference.state_dict()
    del weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        empty_model(reference).load_weights(weights.items())


class TestMultimodalGemma3:
    """Of a multimodal checkpoint the text part is loaded."""

    @pytest.fixture(scope="class")
    def reference(self) -> Any:
        torch.manual_seed(0)
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        }
        text = {**SIZES, "head_dim": 16, "sliding_window": 10, "layer_types": MIXED}
        config = Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=5,
            boi_token_index=6,
            eoi_token_index=7,
        )
        return Gemma3ForConditionalGeneration(config).eval()

    @staticmethod
    def names_of_transformers_4(weights: Weights) -> Weights:
        renamed = {}
        for name, tensor in weights.items():
            name = name.replace("model.language_model.", "language_model.model.")
            name = name.removeprefix("model.")
            if name.startswith("lm_head."):
                name = f"language_model.{name}"
            renamed[name] = tensor
        return renamed

    @pytest.mark.parametrize("version", [4, 5])
    def test_logits(self, reference: Any, version: int) -> None:
        weights = reference.state_dict()
        if version == 4:
            weights = self.names_of_transformers_4(weights)
        model = empty_model(reference)
        used = model.load_weights(weights.items())
        assert used
        assert not any("vision" in name or "projector" in name for name in used)
        tokens = torch.randint(8, 128, (1, 40))
        with torch.no_grad():
            want = reference(tokens).logits[0]
        got = PagedRunner(model).step({0: tokens[0].tolist()})[0]
        assert (got - want).abs().max() < 1e-4


class TestLoadModel:
    """`load_model` reads a checkpoint from disk."""

    @pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen2"])
    def test_equals_the_weights_in_memory(self, name: str, tmp_path: Any) -> None:
        from jubako.checkpoint.info import open_checkpoint

        reference = reference_model(name)
        reference.save_pretrained(tmp_path)
        checkpoint = open_checkpoint(str(tmp_path))
        model = load_model(make_config(checkpoint.hf_config), checkpoint, torch.device("cpu"))
        assert_equal(parameters(model), parameters(from_transformers(reference)))

    def test_layers_have_unique_names(self) -> None:
        model = empty_model(reference_model("gemma3"))
        layers = cache_layers(model)
        assert list(layers) == [f"model.layers.{i}.self_attn.attn" for i in range(4)]
        assert [layer.sliding_window for layer in layers.values()] == [10, 10, None, 10]


class TestRegistry:
    def test_every_listed_architecture_has_a_class(self) -> None:
        for architecture in supported_architectures():
            assert issubclass(get_model_class(architecture), torch.nn.Module)
