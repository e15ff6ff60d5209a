"""What must a layer offer that keeps something of its requests from step to step?"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kv_cache.specs import KVCacheSpec

_DTYPE_NAMES = {"fp8": "float8_e4m3fn"}


def kv_dtype(config: JubakoConfig) -> str:
    """PyTorch's name of the dtype that keys and values are kept in."""
    chosen = config.cache_config.kv_cache_dtype
    return config.model_config.dtype if chosen == "auto" else _DTYPE_NAMES.get(chosen, chosen)


def model_kv_dtype(config: JubakoConfig, what: str) -> str:
    """The model's dtype, as the only one for `what`; ConfigError if another is chosen."""
    if kv_dtype(config) != config.model_config.dtype:
        raise ConfigError(
            f"kv_cache_dtype={config.cache_config.kv_cache_dtype} is not supported for {what}; "
            "use auto.",
            "kv_cache_dtype",
        )
    return config.model_config.dtype


@runtime_checkable
class CacheLayer(Protocol):
    """A layer with pages in the KV cache, which the runner finds by these members."""

    layer_name: str
    """Unique in the model."""

    def get_kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What the layer keeps in blocks of `block_size` tokens."""
        ...

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int) -> None:
        """Use `raw`, [blocks, page bytes] int8, as this layer's pages of `block_size` tokens."""
        ...
