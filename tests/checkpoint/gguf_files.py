"""Small GGUF files for tests, written with the `gguf` package from tiny transformers models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as QuantType

ARCHITECTURES = (
    "arcee",
    "cohere2",
    "gemma2",
    "gemma3",
    "granite",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "phi4-mini",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "smollm3",
    "stablelm",
)
FILE_ARCHITECTURE = {
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "phi4-mini": "phi3",
}
"""What files say that bear another architecture's name."""

PERMUTED = ("arcee", "llama", "granite", "mistral3", "smollm3")
SUMMED = ("gemma2", "gemma3")
FACTORS = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def tiny_model(architecture: str, *, dtype: str = "float32", **changes: Any) -> Any:
    """A random transformers model of 2 to 6 layers whose values bfloat16 can hold."""
    import torch
    import transformers as tf

    common = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    kinds: dict[str, tuple[type, type, dict[str, Any]]] = {
        "gemma3": (
            tf.Gemma3TextConfig,
            tf.Gemma3ForCausalLM,
            {"num_hidden_layers": 6, "sliding_window": 16, "tie_word_embeddings": True},
        ),
        "arcee": (tf.ArceeConfig, tf.ArceeForCausalLM, {}),
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, {}),
        "mistral": (tf.MistralConfig, tf.MistralForCausalLM, {"sliding_window": 16}),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, {"head_dim": 16}),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {}),
        "gemma2": (
            tf.Gemma2Config,
            tf.Gemma2ForCausalLM,
            {"sliding_window": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
        ),
        "phi3": (tf.Phi3Config, tf.Phi3ForCausalLM, {"sliding_window": 16}),
        "phi4-mini": (
            tf.Phi3Config,
            tf.Phi3ForCausalLM,
            {
                "head_dim": 16,
                "original_max_position_embeddings": 256,
                "partial_rotary_factor": 0.75,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": FACTORS,
                    "long_factor": FACTORS[::-1],
                },
            },
        ),
        "ministral3": (
            tf.Ministral3Config,
            tf.Ministral3ForCausalLM,
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1000000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.25,
                }
            },
        ),
        "olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM, {}),
        "olmo3": (
            tf.Olmo3Config,
            tf.Olmo3ForCausalLM,
            {
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "yarn",
                        "rope_theta": 500000.0,
                        "factor": 8.0,
                        "original_max_position_embeddings": 64,
                        "attention_factor": 1.25,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
                },
            },
        ),
        "granite": (
            tf.GraniteConfig,
            tf.GraniteForCausalLM,
            {
                "embedding_multiplier": 12.0,
                "attention_multiplier": 0.125,
                "residual_multiplier": 0.25,
                "logits_scaling": 4.0,
            },
        ),
        "smollm3": (tf.SmolLM3Config, tf.SmolLM3ForCausalLM, {"num_hidden_layers": 5}),
        "stablelm": (
            tf.StableLmConfig,
            tf.StableLmForCausalLM,
            {"head_dim": 16, "use_qkv_bias": True},
        ),
        "cohere2": (
            tf.Cohere2Config,
            tf.Cohere2ForCausalLM,
            {
                "num_hidden_layers": 5,
                "sliding_window": 16,
                "logit_scale": 0.25,
                "tie_word_embeddings": True,
            },
        ),
        "mixtral": (tf.MixtralConfig, tf.MixtralForCausalLM, EXPERTS),
        "qwen3moe": (
            tf.Qwen3MoeConfig,
            tf.Qwen3MoeForCausalLM,
            {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
        ),
    }
    config_class, model_class, own = kinds[architecture]
    torch.manual_seed(0)
    config = config_class(**{**common, **own, **changes})
    if architecture == "gemma3":
        config.query_pre_attn_scalar = config.head_dim
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.5).bfloat16())
    return model.to(getattr(torch, dtype))


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which Llama files keep the rows of queries and keys."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_model(
    path: Path,
    model: Any,
    architecture: str,
    *,
    quantise: Callable[[str], QuantType] = lambda name: QuantType.F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a transformers model as llama.cpp's converter does; `quantise` picks each type."""
    config = model.config
    arch = FILE_ARCHITECTURE.get(architecture, architecture)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture in ("cohere2", "stablelm"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    _add_own_metadata(writer, config, architecture, head_dim)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    for name, value in _with_expert_tensors(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = value.float().numpy()
        if arch in SUMMED and name.endswith("norm.weight"):
            data = data + np.float32(1)
        if arch in PERMUTED and name.endswith(("q_proj.weight", "q_proj.bias")):
            data = permute(data, config.num_attention_heads)
        if arch in PERMUTED and name.endswith(("k_proj.weight", "k_proj.bias")):
            data = permute(data, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        kind = quantise(target) if data.ndim > 1 else QuantType.F32
        writer.add_tensor(target, gguf.quants.quantize(data, kind), raw_dtype=kind)
    finish(writer)
    return path


def _add_own_metadata(
    writer: gguf.GGUFWriter, config: Any, architecture: str, head_dim: int
) -> None:
    """What only some architectures have."""
    rope = config.rope_parameters
    if architecture in SUMMED:
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, name):
                getattr(writer, f"add_{name}")(getattr(config, name))
    if architecture.startswith("phi"):
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if architecture == "phi4-mini":
        for kind in ("short", "long"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if architecture == "olmo3":
        yarn = rope["full_attention"]
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in config.layer_types]
        )
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn["factor"])
        writer.add_rope_scaling_attn_factors(yarn["attention_factor"])
        writer.add_rope_scaling_orig_ctx_len(yarn["original_max_position_embeddings"])
    if architecture == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    if architecture == "stablelm":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_parallel_residual(config.use_parallel_residual)
    if architecture in ("mixtral", "qwen3moe"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _with_expert_tensors(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The experts' matrices as files have them, gate and up apart."""
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            yield f"{stem}gate_proj.weight", gate.contiguous()
            yield f"{stem}up_proj.weight", up.contiguous()
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", value
        else:
            yield name, value


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def add_sentencepiece(
    writer: gguf.GGUFWriter, pieces: list[tuple[str, float, int]], **flags: bool
) -> None:
    """A vocabulary of (text, score, type); `<s>`, `</s>`, `<unk>` are found by their text."""
    texts = [piece[0] for piece in pieces]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([piece[1] for piece in pieces])
    writer.add_token_types([piece[2] for piece in pieces])
    for text, add in (
        ("<s>", writer.add_bos_token_id),
        ("</s>", writer.add_eos_token_id),
        ("<unk>", writer.add_unk_token_id),
    ):
        if text in texts:
            add(texts.index(text))
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)


def sentencepiece_pieces(
    words: list[str], *, with_bytes: bool = True
) -> list[tuple[str, float, int]]:
    """A vocabulary of the words, best first, all their single characters, and the 256 bytes."""
    pieces: list[tuple[str, float, int]] = [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
    ]
    if with_bytes:
        pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    longer = [word for word in dict.fromkeys(words) if len(word) > 1]
    pieces += [(word, -float(i), NORMAL) for i, word in enumerate(longer)]
    chars = sorted({char for word in words for char in word})
    pieces += [(char, -1000.0 - i, NORMAL) for i, char in enumerate(chars)]
    return pieces
