"""How does a checkpoint become a model that can run?"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kernels.registry import get_kernels, set_kernels
from jubako.layers.cache import CacheLayer
from jubako.layers.dtype import default_dtype
from jubako.models.decoder import DecoderForCausalLM
from jubako.models.interface import CausalLM
from jubako.models.registry import get_model_class


def load_model(config: JubakoConfig, checkpoint: Any, device: torch.device) -> nn.Module:
    """Build the model of `config` on `device` and fill it from `checkpoint`.

    `checkpoint` is a `jubako.checkpoint.info.Checkpoint`. Raises UnsupportedModelError for an
    architecture, setting or tensor that the model does not know, and CheckpointError for a tensor
    that is missing or has the wrong shape.
    """
    from jubako.models.loader import load_weights

    model = build_model(config, device)
    keep_blocks = _check_quantization(model, config.model_config.quantization, checkpoint)
    dtype = getattr(torch, config.model_config.dtype)
    weights = load_weights(checkpoint, dtype, device, keep_blocks=keep_blocks)
    cast(CausalLM, model).load_weights(weights)
    return model


def _check_quantization(model: nn.Module, quantization: str, checkpoint: Any) -> bool:
    """Whether a GGUF file's blocks are kept. ConfigError for what cannot be held as asked."""
    if quantization == "none":
        return False
    if get_kernels().name != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} needs the native kernels, and this machine or "
            "--kernels chose others; choose none.",
            "quantization",
        )
    if quantization != "gguf-native":
        return False
    if checkpoint.gguf is None:
        raise ConfigError(
            "quantization='gguf-native' needs a GGUF file, and this model is none; choose int8 or "
            "int4.",
            "quantization",
        )
    if not isinstance(model, DecoderForCausalLM):
        raise ConfigError(
            f"quantization='gguf-native' is not available for {type(model).__name__}; choose int8 "
            "or int4.",
            "quantization",
        )
    return True


def build_model(config: JubakoConfig, device: torch.device) -> nn.Module:
    """The model of `config` with uninitialised weights, in its dtype, on `device`."""
    set_kernels(config.device_config.kernels, device.type)
    model_config = config.model_config
    model_class = get_model_class(
        model_config.architecture,
        pools=model_config.pools,
        implementation=model_config.model_impl,
    )
    with default_dtype(getattr(torch, config.model_config.dtype)), device:
        model = model_class(config)
    return model.eval().requires_grad_(False)


def pack_weights(model: nn.Module, quantization: str = "none") -> None:
    """Let the kernels take over the weights of a loaded model, one matrix at a time.

    Parents come before their parts: a layer may want a part packed in its own way.
    `quantization` is that of `ModelConfig`.
    """
    for module in model.modules():
        pack = getattr(module, "pack", None)
        if pack is not None:
            pack(quantization)


def cache_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that keep something in the KV cache, in order, by name.

    Attention, recurrent layers, and whatever else is a `layers.cache.CacheLayer`.
    """
    return {m.layer_name: m for m in model.modules() if isinstance(m, CacheLayer)}
