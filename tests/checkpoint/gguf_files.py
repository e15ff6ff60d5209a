"""Small GGUF files for tests, written with the `gguf` package from tiny transformers models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as QuantType

ARCHITECTURES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")


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
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, {}),
        "mistral": (tf.MistralConfig, tf.MistralForCausalLM, {"sliding_window": 16}),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, {"head_dim": 16}),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {}),
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
    arch = "llama" if architecture == "mistral" else architecture
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = value.float().numpy()
        if arch == "gemma3" and name.endswith("norm.weight"):
            data = data + np.float32(1)
        if arch == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            data = permute(data, config.num_attention_heads)
        if arch == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            data = permute(data, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        kind = quantise(target) if data.ndim > 1 else QuantType.F32
        writer.add_tensor(target, gguf.quants.quantize(data, kind), raw_dtype=kind)
    finish(writer)
    return path


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
