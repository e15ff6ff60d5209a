"""Every option of Jubako, one frozen dataclass a concern, gathered in `JubakoConfig`.

Nothing else defines an option; the command line, environment variables and docs follow from here.
A value that is only known later makes a new config: `config.replace(cache_config={...})`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from jubako.config.cache import CacheConfig, KVEventsConfig
from jubako.config.device import DeviceConfig
from jubako.config.encoder import EncoderConfig
from jubako.config.lora import LoRAConfig
from jubako.config.model import ModelConfig
from jubako.config.multimodal import MultiModalConfig
from jubako.config.observability import ObservabilityConfig
from jubako.config.options import values_of
from jubako.config.parallel import ParallelConfig
from jubako.config.pooler import PoolerConfig
from jubako.config.scheduler import SchedulerConfig
from jubako.config.server import ServerConfig
from jubako.config.transfer import ECTransferConfig, KVTransferConfig
from jubako.errors import ConfigError

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "ECTransferConfig",
    "EncoderConfig",
    "JubakoConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PoolerConfig",
    "SchedulerConfig",
    "ServerConfig",
]

_CONCERNS: dict[str, type] = {
    "model_config": ModelConfig,
    "pooler_config": PoolerConfig,
    "multimodal_config": MultiModalConfig,
    "encoder_config": EncoderConfig,
    "cache_config": CacheConfig,
    "scheduler_config": SchedulerConfig,
    "parallel_config": ParallelConfig,
    "device_config": DeviceConfig,
    "observability_config": ObservabilityConfig,
    "kv_events_config": KVEventsConfig,
    "lora_config": LoRAConfig,
    "kv_transfer_config": KVTransferConfig,
    "ec_transfer_config": ECTransferConfig,
}

ENGINE_CONCERNS = (
    ModelConfig,
    PoolerConfig,
    MultiModalConfig,
    CacheConfig,
    SchedulerConfig,
    DeviceConfig,
    ObservabilityConfig,
)
"""Concerns whose options appear on the command line of everything that runs a model."""


@dataclass(frozen=True)
class JubakoConfig:
    """Everything that an engine needs to know before it starts."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    pooler_config: PoolerConfig = field(default_factory=PoolerConfig)
    multimodal_config: MultiModalConfig = field(default_factory=MultiModalConfig)
    encoder_config: EncoderConfig = field(default_factory=EncoderConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    kv_events_config: KVEventsConfig = field(default_factory=KVEventsConfig)
    lora_config: LoRAConfig = field(default_factory=LoRAConfig)
    kv_transfer_config: KVTransferConfig = field(default_factory=KVTransferConfig)
    ec_transfer_config: ECTransferConfig = field(default_factory=ECTransferConfig)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> JubakoConfig:
        """Build from flat option names; an unknown one is a `ConfigError` that names it."""
        known = {f.name for concern in _CONCERNS.values() for f in dataclasses.fields(concern)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"Unknown option {unknown[0]!r}.", unknown[0])
        return cls(**{n: c(**values_of(c, options)) for n, c in _CONCERNS.items()})

    def replace(self, **changes: dict[str, Any]) -> JubakoConfig:
        """A new config in which fields of the named concerns have other values."""
        return dataclasses.replace(
            self,
            **{n: dataclasses.replace(getattr(self, n), **c) for n, c in changes.items()},
        )
