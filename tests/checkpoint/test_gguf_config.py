"""GGUF metadata against the configuration of the model that the file was written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as QuantType

from jubako.checkpoint.gguf import GGUFFile
from jubako.checkpoint.gguf_config import config_from_gguf
from jubako.errors import CheckpointError, UnsupportedModelError

from .gguf_files import ARCHITECTURES, finish, tiny_model, write_model

FIELDS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "sliding_window",
    "layer_types",
    "query_pre_attn_scalar",
    "hidden_activation",
    "hidden_act",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_parameters",
    "original_max_position_embeddings",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "layer_norm_eps",
    "use_qkv_bias",
    "use_parallel_residual",
    "no_rope_layers",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_is_that_of_the_original(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    ours = config_from_gguf(GGUFFile(write_model(tmp_path / "m.gguf", model, architecture)))
    theirs = {"architectures": [type(model).__name__], **model.config.to_dict()}
    theirs["architectures"] = [type(model).__name__]
    for field in FIELDS:
        if theirs.get(field) is not None and field in ours:
            expected = theirs[field]
            if field in ("rms_norm_eps", "layer_norm_eps"):
                expected = pytest.approx(expected)
            assert ours[field] == expected, field
    assert ours["dtype"] == "float32"


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "llama", "qwen2", "qwen3"])
def test_config_is_what_transformers_reads(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    write_model(tmp_path / "m.gguf", tiny_model(architecture), architecture, extra=_vocabulary)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    ours = config_from_gguf(GGUFFile(tmp_path / "m.gguf"))
    # transformers takes these from its models' defaults or from the tensors.
    elsewhere = {"architectures", "tie_word_embeddings", "model_type"}
    elsewhere |= {"head_dim", "query_pre_attn_scalar"}
    for field in set(FIELDS) - elsewhere:
        if field in ours and field in theirs:
            assert ours[field] == theirs[field], field


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_vocab_size(96)


def test_flat_rope_names_of_gemma(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("gemma3"), "gemma3")
    config = config_from_gguf(GGUFFile(path))
    assert config["rope_theta"] == config["rope_parameters"]["full_attention"]["rope_theta"]
    assert config["rope_local_base_freq"] == 10_000.0
    assert config["rope_scaling"] is None
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]


def minimal(
    path: Path, architecture: str = "llama", more: Callable[[Any], None] = lambda writer: None
) -> GGUFFile:
    """A file of one layer with nothing but an embedding."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float16))
    more(writer)
    finish(writer)
    return GGUFFile(path)


def test_linear_rope_scaling_of_gemma_is_for_full_layers_only(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    config = config_from_gguf(minimal(tmp_path / "m.gguf", "gemma3", more))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert config["rope_parameters"]["sliding_attention"]["rope_type"] == "default"


def test_gemma_pattern_of_layers_in_the_file(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_array("gemma3.attention.sliding_window_pattern", [False])

    config = config_from_gguf(minimal(tmp_path / "m.gguf", "gemma3", more))
    assert config["layer_types"] == ["full_attention"]


def test_yarn(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    config = config_from_gguf(minimal(tmp_path / "m.gguf", "qwen2", more))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }


def test_llama3_frequencies_give_their_parameters(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2) / 128)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_rope_freq_base(500000.0)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())

    ours = config_from_gguf(minimal(tmp_path / "m.gguf", "llama", more))
    assert ours["rope_parameters"] == pytest.approx(rope)
    assert ours["rope_scaling"]["factor"] == pytest.approx(8.0)


def test_unknown_frequencies_are_refused(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32))

    with pytest.raises(UnsupportedModelError, match="rotary frequencies by a tensor"):
        config_from_gguf(minimal(tmp_path / "m.gguf", "llama", more))


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ([QuantType.F32], "float32"),
        ([QuantType.F16], "float16"),
        ([QuantType.BF16, QuantType.F32], "bfloat16"),
        ([QuantType.F16, QuantType.Q8_0], "bfloat16"),
    ],
)
def test_dtype(tmp_path: Path, kinds: list[QuantType], dtype: str) -> None:
    choice = iter(kinds * 100)
    path = write_model(
        tmp_path / "m.gguf", tiny_model("qwen3"), "qwen3", quantise=lambda name: next(choice)
    )
    assert config_from_gguf(GGUFFile(path))["dtype"] == dtype


# -- refusals ---------------------------------------------------------------------------------


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt2' is not supported; .*gemma3, .*llama"):
        config_from_gguf(minimal(tmp_path / "m.gguf", "gpt2"))


def test_mixture_of_experts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        config_from_gguf(minimal(tmp_path / "m.gguf", "qwen2", lambda w: w.add_expert_count(8)))


def test_part_of_a_split_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        config_from_gguf(
            minimal(tmp_path / "m.gguf", more=lambda w: w.add_uint16("split.count", 3))
        )


def test_partial_rotary(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="rotates 8 of 16 dimensions"):
        config_from_gguf(minimal(tmp_path / "m.gguf", more=lambda w: w.add_rope_dimension_count(8)))


def test_values_that_differ_from_layer_to_layer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="head_count_kv differs from layer to layer"):
        config_from_gguf(minimal(tmp_path / "m.gguf", more=lambda w: w.add_head_count_kv([1, 2])))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"no metadata 'llama\.embedding_length'"):
        config_from_gguf(GGUFFile(path))


def test_missing_embedding(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", np.zeros((8, 32), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"no tensor 'token_embd\.weight'"):
        config_from_gguf(GGUFFile(path))


@pytest.mark.parametrize("value", [0, -3, True, 1.5, "many"])
def test_counts_must_be_positive_integers(tmp_path: Path, value: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32}.get(
        type(value), writer.add_string
    )
    add("llama.embedding_length", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match="embedding_length must be a positive integer"):
        config_from_gguf(GGUFFile(tmp_path / "m.gguf"))
