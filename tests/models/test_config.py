"""config.json is read as transformers reads it, in the style of its versions 4 and 5."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models import (
    arcee,
    cohere2,
    gemma2,
    gemma3,
    granite,
    llama,
    ministral3,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)
from jubako.models.encoder_decoder import LayerArgs
from jubako.models.hf_config import FULL, SLIDING


def llama_args(config: dict[str, Any]) -> llama.ModelArgs:
    return llama.ModelArgs.from_config(config, "LlamaForCausalLM")


def mistral_args(config: dict[str, Any]) -> llama.ModelArgs:
    return llama.ModelArgs.from_config(config, "MistralForCausalLM")


def ministral_args(config: dict[str, Any]) -> llama.ModelArgs:
    return llama.ModelArgs.from_config(config, "MinistralForCausalLM")


def olmo2_args(config: dict[str, Any]) -> olmo2.ModelArgs:
    return olmo2.ModelArgs.from_config(config, "Olmo2ForCausalLM")


def olmo3_args(config: dict[str, Any]) -> olmo2.ModelArgs:
    return olmo2.ModelArgs.from_config(config, "Olmo3ForCausalLM")


FAMILIES: dict[str, tuple[Any, type]] = {
    "arcee": (arcee.ModelArgs.from_config, transformers.ArceeConfig),
    "cohere2": (cohere2.ModelArgs.from_config, transformers.Cohere2Config),
    "gemma2": (gemma2.ModelArgs.from_config, transformers.Gemma2Config),
    "granite": (granite.ModelArgs.from_config, transformers.GraniteConfig),
    "ministral": (ministral_args, transformers.MinistralConfig),
    "ministral3": (ministral3.ModelArgs.from_config, transformers.Ministral3Config),
    "olmo2": (olmo2_args, transformers.Olmo2Config),
    "olmo3": (olmo3_args, transformers.Olmo3Config),
    "phi3": (phi3.ModelArgs.from_config, transformers.Phi3Config),
    "smollm3": (smollm3.ModelArgs.from_config, transformers.SmolLM3Config),
    "stablelm": (stablelm.ModelArgs.from_config, transformers.StableLmConfig),
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
    if family == "olmo3" and "rope_theta" in partial:
        pytest.skip("transformers gives the base to some layers only; see TestOlmo3")
    if family == "phi3" and partial.get("rope_scaling"):
        pytest.skip("transformers knows only longrope here; see TestPhi3")
    if family == "stablelm" and "head_dim" in partial:
        pytest.skip("no model can have it; it is refused")
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


class TestGemma2:
    def test_a_cap_that_is_null_is_none(self) -> None:
        args = gemma2.ModelArgs.from_config({"attn_logit_softcapping": None})
        assert args.attn_logit_softcapping is None
        assert args.final_logit_softcapping == 30.0

    def test_embedding_models_are_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
            gemma2.ModelArgs.from_config({"use_bidirectional_attention": True})


class TestPhi3:
    def test_longrope_in_all_its_styles(self) -> None:
        factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
        lengths = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
        old = {**lengths, "rope_theta": 5000.0, "rope_scaling": {"type": "su", **factors}}
        new = transformers.Phi3Config(
            **lengths, rope_parameters={"rope_type": "longrope", "rope_theta": 5000.0, **factors}
        )
        rope = phi3.ModelArgs.from_config(old).rope
        assert rope == phi3.ModelArgs.from_config(new.to_dict()).rope
        assert (rope.rope_type, rope.theta) == ("longrope", 5000.0)
        assert rope.scaling["original_max_position_embeddings"] == 4096

    def test_a_part_of_each_head(self) -> None:
        args = phi3.ModelArgs.from_config({"partial_rotary_factor": 0.75})
        understood = transformers.Phi3Config(partial_rotary_factor=0.75)
        assert args == phi3.ModelArgs.from_config(understood.to_dict())
        assert args.rope.scaling["partial_rotary_factor"] == 0.75


class TestOlmo3:
    def test_one_base_for_all_layers_and_scaling_for_those_that_see_everything(self) -> None:
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
        args = olmo3_args({"rope_theta": 3e5, "rope_scaling": yarn})
        assert (args.rope[FULL].theta, args.rope[SLIDING].theta) == (3e5, 3e5)
        assert (args.rope[FULL].rope_type, args.rope[SLIDING].rope_type) == ("yarn", "default")

    def test_three_of_four_layers_have_a_window(self) -> None:
        assert olmo3_args({"num_hidden_layers": 5}).layer_types == [
            SLIDING, SLIDING, SLIDING, FULL, SLIDING,
        ]  # fmt: skip


class TestSmolLM3:
    def test_layers_without_positions(self) -> None:
        read = smollm3.ModelArgs.from_config
        assert read({"num_hidden_layers": 5}).rotates == [True, True, True, False, True]
        args = read(
            {
                "num_hidden_layers": 2,
                "no_rope_layers": [0, 1],
                "use_sliding_window": True,
                "sliding_window": 9,
            }
        )
        assert args.rotates == [False, True]
        assert args.layer_types == [SLIDING, FULL]

    @pytest.mark.parametrize("entry", [[1], [1, 2], "x"])
    def test_entries_must_fit(self, entry: Any) -> None:
        with pytest.raises(CheckpointError, match="no_rope_layers"):
            smollm3.ModelArgs.from_config({"num_hidden_layers": 2, "no_rope_layers": entry})


def test_stablelm_turns_a_quarter_of_a_head_unless_told() -> None:
    read = stablelm.ModelArgs.from_config
    assert read({}).rope.scaling["partial_rotary_factor"] == 0.25
    assert read({"partial_rotary_factor": 0.5}).rope.scaling["partial_rotary_factor"] == 0.5
    nested = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}
    assert read(nested).rope.scaling["partial_rotary_factor"] == 1.0


def test_stablelm_refuses_norms_of_heads() -> None:
    with pytest.raises(UnsupportedModelError, match="qk_layernorm"):
        stablelm.ModelArgs.from_config({"qk_layernorm": True})
    with pytest.raises(UnsupportedModelError, match="head_dim=48"):
        stablelm.ModelArgs.from_config({"head_dim": 48})


def test_cohere2_layer_types_from_a_pattern() -> None:
    args = cohere2.ModelArgs.from_config({"num_hidden_layers": 4, "sliding_window_pattern": 2})
    understood = transformers.Cohere2Config(num_hidden_layers=4, sliding_window_pattern=2)
    assert args.layer_types == understood.layer_types == [SLIDING, FULL, SLIDING, FULL]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("use_qk_norm", True),
        ("use_parallel_block", False),
        ("use_gated_activation", False),
        ("rotary_pct", 0.5),
    ],
)
def test_cohere2_forms_that_are_not_known_are_refused(name: str, entry: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} = {entry}"):
        cohere2.ModelArgs.from_config({name: entry})


@pytest.mark.parametrize("read", [mistral_args, ministral_args, smollm3.ModelArgs.from_config])
def test_layers_with_a_window_need_one(read: Any) -> None:
    entries = {"num_hidden_layers": 1, "layer_types": [SLIDING], "sliding_window": None}
    with pytest.raises(UnsupportedModelError, match="no sliding_window is in use"):
        read(entries)


@pytest.mark.parametrize("read", [mistral_args, ministral_args])
def test_mistral_windows_in_some_layers(read: Any) -> None:
    types = [FULL, SLIDING]
    args = read({"num_hidden_layers": 2, "layer_types": types, "sliding_window": 7})
    assert (args.layer_types, args.sliding_window) == (types, 7)


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
    if family in ("cohere2", "stablelm"):
        name = name.replace("rms_norm_eps", "layer_norm_eps")
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


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("count", [10**9, 0, "x"])
def test_each_side_of_a_model_has_a_number_of_layers_that_can_be(side: str, count: Any) -> None:
    sizes: dict[str, Any] = {"layers": 2, "heads": 4, "ffn": 8, "size": 16}
    with pytest.raises(CheckpointError, match=f"{side}_layers in config.json must be an integer"):
        LayerArgs.from_config({f"{side}_layers": count}, side, **sizes, norm_first=True)
