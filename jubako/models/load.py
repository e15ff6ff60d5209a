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
from jubako.models.kept_weights import KeptWeights
from jubako.models.registry import get_model_class
from jubako.utils.free_memory import give_back_freed_memory


def ready_model(
    config: JubakoConfig, checkpoint: Any, device: torch.device
) -> tuple[nn.Module, KeptWeights | None]:
    """The model of `config` with its weights as the kernels read them.

    They come from an earlier start where it left them, else from `checkpoint`, as `load_model`
    says; then the second result can write them for the next one.
    """
    model = build_model(config, device)
    keep_blocks = _check_quantization(model, config, checkpoint)
    kept = KeptWeights.of(config, checkpoint, device)
    is_there = kept is not None and kept.restore(model)
    if not is_there:
        _fill(model, config, checkpoint, device, keep_blocks)
    pack_weights(model, config.model_config.quantization)
    if not is_there:
        give_back_freed_memory()
        if kept is not None:
            kept.keep(model)
    return model, kept


def load_model(config: JubakoConfig, checkpoint: Any, device: torch.device) -> nn.Module:
    """Build the model of `config` on `device` and fill it from `checkpoint`.

    `checkpoint` is a `jubako.checkpoint.info.Checkpoint`. Raises UnsupportedModelError for an
    architecture, setting or tensor that the model does not know, and CheckpointError for a tensor
    that is missing or has the wrong shape.
    """
    model = build_model(config, device)
    keep_blocks = _check_quantization(model, config, checkpoint)
    _fill(model, config, checkpoint, device, keep_blocks)
    return model


def _fill(
    model: nn.Module, config: JubakoConfig, checkpoint: Any, device: torch.device, keep_blocks: bool
) -> None:
    from jubako.models.loader import load_weights

    dtype = getattr(torch, config.model_config.dtype)
    weights = load_weights(checkpoint, dtype, device, keep_blocks=keep_blocks)
    cast(CausalLM, model).load_weights(weights)


def _check_quantization(model: nn.Module, config: JubakoConfig, checkpoint: Any) -> bool:
    """Whether a GGUF file's blocks are kept. ConfigError for what cannot be held as asked."""
    quantization, dtype = config.model_config.quantization, config.model_config.dtype
    if quantization == "none":
        return False
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(
            f"quantization={quantization!r} computes in bfloat16 or float32, not in {dtype}; "
            "choose one of them as dtype, or quantization none.",
            "quantization",
        )
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
