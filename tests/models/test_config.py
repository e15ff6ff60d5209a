"""config.json is read as transformers reads it, in the style of its versions 4 and 5."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models import gemma3, llama, qwen2, qwen3
from jubako.models.hf_config import FULL, SLIDING


def llama_args(config: dict[str, Any]) -> llama.ModelArgs:
    return llama.ModelArgs.from_config(config, "LlamaForCausalLM")


def mistral_args(config: dict[str, Any]) -> llama.ModelArgs:
    return llama.ModelArgs.from_config(config, "MistralForCausalLM")


FAMILIES: dict[str, tuple[Any, type]] = {
    "gemma3": (gemma3.ModelArgs.from_config, transformers.Gemma3TextConfig),
    "llama": (llama_args, transformers.LlamaConfig),
    "mistral": (mistral_args, transformers.MistralConfig),
    "qwen2": (qwen2.ModelArgs.from_config, transformers.Qwen2Config),
    "qwen3": (qwen3.ModelArgs.from_config, transformers.Qwen3Config),
}

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_what_is_left_out_has_transformers_default(family: str) -> None:
    read, config_class = FAMILIES[family]
    assert read({}) == read(config_class().to_dict())


@every_family
@pytest.mark.parametrize(
    "partial",
    [
        {"num_hidden_layers": 7, "hidden_size": 96, "num_attention_heads": 6},
        {"num_key_value_heads": 2, "max_position_embeddings": 99, "tie_word_embeddings": False},
        {"tie_word_embeddings": True, "sliding_window": 5, "use_sliding_window": True},
        {"head_dim": 40, "rms_norm_eps": 1e-5},
        {"rope_theta": 5000.0},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0}},
        {"rope_scaling": None},
    ],
    ids=lambda partial: ",".join(partial),
)
def test_reads_as_transformers_does(family: str, partial: dict[str, Any]) -> None:
    read, config_class = FAMILIES[family]
    understood = config_class(
        **{k: dict(v) if isinstance(v, dict) else v for k, v in partial.items()}
    )
    assert read(partial) == read(understood.to_dict())


@every_family
def test_rope_type_by_its_old_name(family: str) -> None:
    read, _ = FAMILIES[family]
    old, new = ({"rope_scaling": {name: "linear", "factor": 2.0}} for name in ("type", "rope_type"))
    assert read(old) == read(new)


def test_head_dim_follows_from_the_hidden_size() -> None:
    config = {"hidden_size": 96, "num_attention_heads": 6}
    assert llama_args(config).head_dim == 16
    assert llama_args({**config, "head_dim": None}).head_dim == 16
    assert qwen2.ModelArgs.from_config(config).head_dim == 16
    assert qwen3.ModelArgs.from_config(config).head_dim == 128


def test_mistral_window_that_is_null_is_none() -> None:
    assert mistral_args({"sliding_window": None}).sliding_window is None
    assert mistral_args({}).sliding_window == 4096
    assert llama_args({"sliding_window": 8}).sliding_window is None


class TestQwenWindows:
    @pytest.mark.parametrize("read", [qwen2.ModelArgs.from_config, qwen3.ModelArgs.from_config])
    def test_late_layers_only(self, read: Any) -> None:
        config = {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        }
        args = read(config)
        assert args.layer_types == [FULL, FULL, FULL, SLIDING]
        assert args.sliding_window == 9

    @pytest.mark.parametrize("read", [qwen2.ModelArgs.from_config, qwen3.ModelArgs.from_config])
    def test_a_window_that_is_not_used_is_none(self, read: Any) -> None:
        args = read({"num_hidden_layers": 2, "sliding_window": 9, "max_window_layers": 0})
        assert args.sliding_window is None
        assert args.layer_types == [FULL, FULL]


class TestGemma3:
    def test_layer_types_from_a_pattern(self) -> None:
        for name in ("sliding_window_pattern", "_sliding_window_pattern"):
            args = gemma3.ModelArgs.from_config({"num_hidden_layers": 7, name: 3})
            assert args.layer_types == [
                SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING,
            ]  # fmt: skip

    def test_rope_of_transformers_4(self) -> None:
        args = gemma3.ModelArgs.from_config(
            {
                "rope_theta": 2e6,
                "rope_local_base_freq": 3e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            }
        )
        assert (args.rope[FULL].theta, args.rope[SLIDING].theta) == (2e6, 3e4)
        assert (args.rope[FULL].rope_type, args.rope[SLIDING].rope_type) == ("linear", "default")
        assert args.rope[FULL].scaling == {"factor": 8.0}

    def test_rope_of_transformers_5(self) -> None:
        old = {
            "rope_theta": 2e6,
            "rope_local_base_freq": 3e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
        new = transformers.Gemma3TextConfig(**old).to_dict()
        assert "rope_theta" not in new
        read = gemma3.ModelArgs.from_config
        assert read(new).rope == read(old).rope

    def test_text_part_of_a_multimodal_config(self) -> None:
        text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
        args = gemma3.ModelArgs.from_config({"text_config": text, "vision_config": {}})
        assert args == gemma3.ModelArgs.from_config(text)
        assert args.tie_word_embeddings

    def test_embedding_models_are_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
            gemma3.ModelArgs.from_config({"use_bidirectional_attention": True})


@pytest.mark.parametrize("read", [gemma3.ModelArgs.from_config, qwen3.ModelArgs.from_config])
def test_layer_types_must_fit(read: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="names 1 layer_types for 2 layers"):
        read({"num_hidden_layers": 2, "layer_types": [FULL]})
    with pytest.raises(UnsupportedModelError, match="'chunked_attention'"):
        read({"num_hidden_layers": 1, "layer_types": ["chunked_attention"]})


BAD_ENTRIES: list[tuple[str, Any]] = [
    ("hidden_size", "64"),
    ("hidden_size", -64),
    ("hidden_size", 2**40),
    ("num_attention_heads", 0),
    ("num_attention_heads", [4]),
    ("num_key_value_heads", 0),
    ("num_hidden_layers", 3.0),
    ("num_hidden_layers", True),
    ("num_hidden_layers", 1_000_000),
    ("head_dim", 0),
    ("head_dim", "a"),
    ("rms_norm_eps", "x"),
    ("rms_norm_eps", math.nan),
    ("tie_word_embeddings", "yes"),
    ("max_position_embeddings", "x"),
    ("rope_theta", "x"),
    ("rope_theta", 0),
    ("rope_scaling", [1]),
    ("rope_parameters", "default"),
]


@every_family
@pytest.mark.parametrize(("name", "entry"), BAD_ENTRIES, ids=str)
def test_an_entry_of_the_wrong_kind_is_named_with_its_value(
    family: str, name: str, entry: Any
) -> None:
    read, _ = FAMILIES[family]
    with pytest.raises(CheckpointError) as caught:
        read({name: entry})
    assert name in str(caught.value)
    assert str(entry)[:9] in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name", "entry"),
    [
        ("gemma3", "text_config", [1]),
        ("gemma3", "sliding_window_pattern", 0),
        ("gemma3", "final_logit_softcapping", "x"),
        ("gemma3", "query_pre_attn_scalar", "x"),
        ("gemma3", "rope_local_base_freq", "x"),
        ("mistral", "sliding_window", -1),
        ("llama", "attention_bias", 1),
        ("qwen2", "max_window_layers", "x"),
        ("qwen3", "layer_types", "full_attention"),
        ("qwen3", "layer_types", [[]]),
    ],
)
def test_entries_of_one_family_are_checked_too(family: str, name: str, entry: Any) -> None:
    read, _ = FAMILIES[family]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=name):
        read({name: entry, "use_sliding_window": True, "num_hidden_layers": 1})
