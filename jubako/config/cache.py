"""How is KV memory cut into blocks, and which of it is kept for re-use?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types, option
from jubako.errors import ConfigError


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    block_size: int | None = option(None, "Tokens per KV block (default: 32 on a CPU, else 16).")
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV blocks, whatever the memory says."
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Memory for KV, for example 4GiB (default: half of what is free at start)."
    )
    gpu_memory_utilization: float = option(0.9, "Share of a GPU's memory that the engine may use.")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "int8"] = option(
        "auto",
        "Dtype of keys and values in the KV cache (auto: dtype). fp8 and int8 take half the memory "
        "of bfloat16, with a scale for each key and value.",
    )
    enable_prefix_caching: bool | None = option(
        None, "Keep KV of finished prompts for re-use (default: wherever the model allows it)."
    )
    prefix_caching_hash_algo: Literal[
        "blake2b", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"
    ] = option("blake2b", "Hash of KV blocks; change it only to exchange KV with other engines.")
    mamba_cache_mode: Literal["none", "align", "all"] | None = option(
        None,
        "Which states of recurrent layers are kept for re-use: none, those where a step ended at a "
        "block border (align), or those at every block border (all; default where the model can "
        "write them, else align).",
    )
    mamba_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Dtype of the inputs that convolutions of recurrent layers keep (auto: dtype)."
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Dtype of the states of recurrent layers (auto: float32)."
    )
    watermark: float = option(
        0.0, "Share of KV blocks kept free when a request is admitted while others run."
    )
    kv_cache_metrics: bool = option(False, "Sample how long KV blocks live and when they are used.")
    kv_cache_metrics_sample: float = option(0.01, "Share of blocks sampled for that, above 0.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.", name)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 "
                "and at most 1.",
                "gpu_memory_utilization",
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(
                f"watermark={self.watermark} must be at least 0 and below 1.", "watermark"
            )
        if not 0 < self.kv_cache_metrics_sample <= 1:
            raise ConfigError(
                f"kv_cache_metrics_sample={self.kv_cache_metrics_sample} must be above 0 "
                "and at most 1.",
                "kv_cache_metrics_sample",
            )


@dataclass(frozen=True)
class KVEventsConfig:
    """Announcements of which KV blocks come and go."""

    enable_kv_cache_events: bool = False
    use_int_block_hashes: bool = False
