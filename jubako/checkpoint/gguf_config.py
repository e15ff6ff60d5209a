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
GEMMA2_27B_LAYERS = 46
COHERE2_SLIDING_WINDOW_PATTERN = 4
SMOLLM3_NO_ROPE_INTERVAL = 4

_WITH_EXPERTS = ("llama", "qwen3moe")
"""Architectures whose mixtures of experts are supported."""

_WITH_LAYER_NORM = ("cohere2", "stablelm")

_TURNS_A_PART = ("phi3", "stablelm")
"""Architectures whose heads may turn in part."""

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
    if keys.get("expert_count", 0) and architecture not in _WITH_EXPERTS:
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
        **_norm_eps(keys),
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
    if rotary != config["head_dim"] and keys.architecture not in _TURNS_A_PART:
        raise UnsupportedModelError(
            f"{file.path.name} rotates {rotary} of {config['head_dim']} dimensions of a head; "
            f"{keys.architecture} models turn whole heads."
        )
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = token
    return config


def _norm_eps(keys: _Keys) -> dict[str, Any]:
    """The norms' epsilon, under the name of the norm that the architecture uses."""
    if keys.architecture in _WITH_LAYER_NORM:
        return {"layer_norm_eps": keys.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


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
        "final_logit_softcapping": _number_or_none(keys, "final_logit_softcapping"),
        "use_bidirectional_attention": False,
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, GEMMA3_SLIDING_WINDOW_PATTERN),
        "rope_theta": theta,
        "rope_local_base_freq": local,
        "rope_scaling": scaling,
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
    }


def _number_or_none(keys: _Keys, key: str) -> float | None:
    return None if keys.get(key) is None else keys.number(key)


def _layer_types(keys: _Keys, default_period: int) -> list[str]:
    """Which layers look back only a window: all but every n-th, unless the file says otherwise."""
    num_layers = keys.integer("block_count")
    name = f"{keys.architecture}.attention.sliding_window_pattern"
    pattern = keys.file.metadata.get(name)
    if isinstance(pattern, GGUFArray):
        flags = [bool(flag) for flag in pattern]
        if len(flags) != num_layers:
            raise CheckpointError(f"{name} has {len(flags)} entries for {num_layers} layers.")
    else:
        period = keys.integer("attention.sliding_window_pattern", default_period)
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
    if keys.get("expert_count", 0):
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "sliding_window": None,
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


def _arcee(keys: _Keys) -> dict[str, Any]:
    return {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "hidden_act": "relu2",
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in keys.file.tensors,
        **_rope(keys),
    }


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


def _qwen3moe(keys: _Keys) -> dict[str, Any]:
    return _qwen3(keys) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(keys: _Keys) -> dict[str, Any]:
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", 256)
    # The largest model alone scales queries by the width per head instead of the head's size.
    largest = keys.integer("block_count") == GEMMA2_27B_LAYERS
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": (
            hidden_size // keys.integer("attention.head_count") if largest else head_dim
        ),
        "attn_logit_softcapping": _number_or_none(keys, "attn_logit_softcapping"),
        "final_logit_softcapping": _number_or_none(keys, "final_logit_softcapping"),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, 2),
        **_rope(keys),
    }


def _phi3(keys: _Keys) -> dict[str, Any]:
    head_dim = keys.integer("embedding_length") // keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, head_dim))
    rotary = keys.integer("rope.dimension_count", head_dim)
    context = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", context)
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_factors_long.weight" in keys.file.tensors:
        rope = {
            "rope_type": "longrope",
            "long_factor": _factors(keys.file, "rope_factors_long.weight", rotary // 2),
            "short_factor": _factors(keys.file, "rope_factors_short.weight", rotary // 2),
            "original_max_position_embeddings": original,
        }
        if keys.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = keys.number("rope.scaling.attn_factor")
    window = keys.get("attention.sliding_window")
    rope["rope_theta"] = keys.number("rope.freq_base", 10_000.0)
    rope["partial_rotary_factor"] = rotary / head_dim
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": keys.integer("attention.sliding_window") if window else None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def _factors(file: GGUFFile, name: str, count: int) -> list[float]:
    """What each rotary frequency is divided by."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{file.path.name} has no tensor {name!r}.")
    if tensor.type != "F32" or tensor.numel != count:
        raise CheckpointError(
            f"Tensor {name!r} is {tensor.type} {list(tensor.shape)}; it must be F32 [{count}]."
        )
    return [float(factor) for factor in file.read(name).view("<f4")]


def _mistral3(keys: _Keys) -> dict[str, Any]:
    rope = dict(_rope(keys)["rope_parameters"])
    if keys.get("rope.scaling.yarn_log_multiplier") is not None:
        # Files have one number for both of the factors whose ratio scales the rotation.
        rope["mscale"] = rope["mscale_all_dim"] = keys.number("rope.scaling.yarn_log_multiplier")
    if keys.get("attention.temperature_scale") is not None:
        rope["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "hidden_act": "silu",
        "sliding_window": None,
        "rope_parameters": rope,
    }


def _olmo2(keys: _Keys) -> dict[str, Any]:
    config = {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_act": "silu",
        "attention_bias": False,
        **_rope(keys),
    }
    if keys.get("attention.sliding_window"):
        # OLMo 3 bears its predecessor's name; the window is what tells them apart.
        theta = config["rope_theta"]
        config |= {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "sliding_window": keys.integer("attention.sliding_window"),
            "layer_types": _layer_types(keys, 4),
            "rope_parameters": {
                "full_attention": config["rope_parameters"],
                "sliding_attention": {"rope_theta": theta, "rope_type": "default"},
            },
        }
    return config


def _granite(keys: _Keys) -> dict[str, Any]:
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in keys.file.tensors,
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        **_rope(keys),
    }


def _smollm3(keys: _Keys) -> dict[str, Any]:
    num_layers = keys.integer("block_count")
    interval = SMOLLM3_NO_ROPE_INTERVAL
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in keys.file.tensors,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": [int((i + 1) % interval != 0) for i in range(num_layers)],
        "no_rope_layer_interval": interval,
        "layer_types": ["full_attention"] * num_layers,
        **_rope(keys),
    }


def _cohere2(keys: _Keys) -> dict[str, Any]:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _layer_types(keys, COHERE2_SLIDING_WINDOW_PATTERN),
        **_rope(keys),
    }


def _stablelm(keys: _Keys) -> dict[str, Any]:
    head_dim = keys.integer("embedding_length") // keys.integer("attention.head_count")
    rope = _rope(keys)
    rotary = keys.integer("rope.dimension_count", max(1, head_dim))
    rope["rope_parameters"]["partial_rotary_factor"] = rotary / max(1, head_dim)
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "hidden_act": "silu",
        "use_qkv_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.file.tensors,
        "use_parallel_residual": bool(keys.get("use_parallel_residual", False)),
        **rope,
    }


_BUILDERS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "arcee": _arcee,
    "cohere2": _cohere2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
}
