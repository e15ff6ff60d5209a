"""How does a checkpoint become a model that can run?"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.registry import set_kernels
from jubako.layers.cache import CacheLayer
from jubako.layers.dtype import default_dtype
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
    dtype = getattr(torch, config.model_config.dtype)
    cast(CausalLM, model).load_weights(load_weights(checkpoint, dtype, device))
    return model


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


def pack_weights(model: nn.Module) -> None:
    """Let the kernels take over the weights of a loaded model, one matrix at a time.

    Parents come before their parts: a layer may want a part packed in its own way.
    """
    for module in model.modules():
        pack = getattr(module, "pack", None)
        if pack is not None:
            pack()


def cache_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that keep something in the KV cache, in order, by name.

    Attention, recurrent layers, and whatever else is a `layers.cache.CacheLayer`.
    """
    return {m.layer_name: m for m in model.modules() if isinstance(m, CacheLayer)}
