"""What would the `config.json` of a GGUF file's model say?

GGUF metadata keys (llama.cpp's names, `<architecture>.<key>`) become the fields of transformers'
configuration classes, with the flat rope names of transformers 4 (`rope_theta`, `rope_scaling`,
`rope_local_base_freq`) beside the `rope_parameters` of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jubako.checkpoint.gguf import GGUFArray, GGUFFile
from jubako.errors import CheckpointError, UnsupportedModelError

GEMMA3_LOCAL_ROPE_BASE = 10_000.0
GEMMA3_SLIDING_WINDOW_PATTERN = 6
GEMMA3_27B_LAYERS = 62

_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Keys:
    """Typed access to the metadata of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`; one that is repeated for each layer counts once."""
        name = f"{self.architecture}.{key}"
        value = self.file.metadata.get(name, default)
        if not isinstance(value, GGUFArray):
            return value
        values = value.tolist()
        if not values or any(v != values[0] for v in values):
            raise UnsupportedModelError(
                f"{name} differs from layer to layer, which is not supported for "
                f"{self.architecture} models."
            )
        return values[0]

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be there."""
        value = self.get(key, default)
        name = f"{self.architecture}.{key}"
        if value is None:
            raise CheckpointError(f"{self.file.path.name} has no metadata {name!r}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{name} must be a positive integer, got {value!r}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; without a default it must be there."""
        value = self.get(key, default)
        name = f"{self.architecture}.{key}"
        if value is None:
            raise CheckpointError(f"{self.file.path.name} has no metadata {name!r}.")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise CheckpointError(f"{name} must be a finite number, got {value!r}.")
        return value


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The model's configuration in Hugging Face's names.

    Raises `UnsupportedModelError` for an architecture or a feature that is not supported, and
    `CheckpointError` where metadata or tensors that every model has are missing.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{file.path.name} has no metadata 'general.architecture'.")
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path.name} is one of {file.metadata['split.count']} parts of a model; join "
            "them with llama.cpp's `gguf-split --merge` first."
        )
    build = _BUILDERS.get(architecture)
    if build is None:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(sorted(_BUILDERS))}."
        )
    keys = _Keys(file, architecture)
    if keys.get("expert_count", 0):
        raise UnsupportedModelError(
            f"{file.path.name} is a mixture of experts, which is not supported for GGUF "
            f"architecture {architecture!r}."
        )
    return _common(keys) | build(keys)


def _common(keys: _Keys) -> dict[str, Any]:
    file = keys.file
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path.name} has no tensor 'token_embd.weight'.")
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    config: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": keys.integer("attention.key_length", max(1, hidden_size // num_heads)),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_dropout": 0.0,
        "dtype": _dtype(file),
    }
    value_length = keys.integer("attention.value_length", config["head_dim"])
    if value_length != config["head_dim"]:
        raise UnsupportedModelError(
            f"{file.path.name} has keys of {config['head_dim']} and values of {value_length} "
            "dimensions; they must be equal."
        )
    rotary = keys.integer("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        raise UnsupportedModelError(
            f"{file.path.name} rotates {rotary} of {config['head_dim']} dimensions of a head; "
            "partial rotary embeddings are not supported."
        )
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = token
    return config


def _dtype(file: GGUFFile) -> str:
    """The precision of the matrices; bfloat16 where any of them is quantised."""
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) >= 2}
    if not types <= _FLOAT_TYPES.keys():
        return "bfloat16"
    for name in ("BF16", "F16", "F32"):
        if name in types:
            return _FLOAT_TYPES[name]
    return "float32"


# -- rotary embeddings ------------------------------------------------------------------------


def _rope_scaling(keys: _Keys, head_dim: int, base: float) -> dict[str, Any] | None:
    """transformers' `rope_scaling` of the file, or None."""
    file = keys.file
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, base)
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    if kind == "none" and factor is not None:
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor", factor)}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            "original_max_position_embeddings": keys.integer(
                "rope.scaling.original_context_length"
            ),
        }
        for name, key in (
            ("attention_factor", "attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if keys.get(f"rope.scaling.{key}") is not None:
                scaling[name] = keys.number(f"rope.scaling.{key}")
        return scaling
    raise UnsupportedModelError(f"Rope scaling {kind!r} of {file.path.name} is not supported.")


def _llama3_scaling(file: GGUFFile, head_dim: int, base: float) -> dict[str, Any]:
    """Find the Llama 3 parameters whose frequency divisors the file holds as a tensor."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type != "F32" or tensor.numel != head_dim // 2:
        raise CheckpointError(
            f"Tensor 'rope_freqs.weight' is {tensor.type} {list(tensor.shape)}; "
            f"it must be F32 [{head_dim // 2}]."
        )
    divisors = file.read("rope_freqs.weight").view("<f4").astype(np.float64)
    for original in (8192, 4096, 16384, 32768):
        scaling = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if np.allclose(divisors, _llama3_divisors(scaling, head_dim, base), rtol=1e-4):
            return scaling
    raise UnsupportedModelError(
        f"{file.path.name} scales its rotary frequencies by a tensor that is none of Llama 3's."
    )


def _llama3_divisors(scaling: dict[str, Any], head_dim: int, base: float) -> np.ndarray:
    """By what each rotary frequency is divided `[head_dim / 2]` (Llama 3.1's rule)."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    original = scaling["original_max_position_embeddings"]
    low, high, factor = (scaling[n] for n in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _rope(keys: _Keys) -> dict[str, Any]:
    """Rope fields of a model with one rotary embedding for all layers."""
    head_dim = keys.integer("embedding_length") // keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, head_dim))
    theta = keys.number("rope.freq_base", 10_000.0)
    scaling = _rope_scaling(keys, head_dim, theta)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    }


# -- architectures ----------------------------------------------------------------------------


def _gemma3(keys: _Keys) -> dict[str, Any]:
    num_layers = keys.integer("block_count")
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", 256)
    theta = keys.number("rope.freq_base", 1_000_000.0)
    local = keys.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_BASE)
    scaling = _rope_scaling(keys, head_dim, theta)
    # The largest model alone scales queries by the width per head instead of the head's size.
    scalar = hidden_size // num_heads if num_layers == GEMMA3_27B_LAYERS else head_dim
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": _softcap(keys),
        "use_bidirectional_attention": False,
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "layer_types": _gemma3_layer_types(keys, num_layers),
        "rope_theta": theta,
        "rope_local_base_freq": local,
        "rope_scaling": scaling,
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
    }


def _softcap(keys: _Keys) -> float | None:
    cap = keys.get("final_logit_softcapping")
    return None if cap is None else keys.number("final_logit_softcapping")


def _gemma3_layer_types(keys: _Keys, num_layers: int) -> list[str]:
    """Which layers look back only a window: all but every sixth, unless the file says otherwise."""
    pattern = keys.file.metadata.get("gemma3.attention.sliding_window_pattern")
    if isinstance(pattern, GGUFArray):
        flags = [bool(flag) for flag in pattern]
        if len(flags) != num_layers:
            raise CheckpointError(
                f"gemma3.attention.sliding_window_pattern has {len(flags)} entries for "
                f"{num_layers} layers."
            )
    else:
        period = keys.integer("attention.sliding_window_pattern", GEMMA3_SLIDING_WINDOW_PATTERN)
        flags = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _llama(keys: _Keys) -> dict[str, Any]:
    tensors = keys.file.tensors
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "pretraining_tp": 1,
        **_rope(keys),
    }
    window = keys.get("attention.sliding_window")
    if window:
        # Mistral's files bear Llama's name; the window is what tells them apart.
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": keys.integer("attention.sliding_window"),
        }
    return config


def _qwen2(keys: _Keys) -> dict[str, Any]:
    num_layers = keys.integer("block_count")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        **_rope(keys),
    }


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return _qwen2(keys) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
    }


_BUILDERS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
