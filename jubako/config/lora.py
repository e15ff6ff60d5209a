"""How many adapters work at once?"""

from __future__ import annotations

from dataclasses import dataclass

from jubako.config.options import check_types
from jubako.errors import ConfigError


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters on top of the model."""

    max_loras: int | None = None
    """Most different adapters among the running requests; None: no limit."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_loras is not None and self.max_loras < 1:
            raise ConfigError(f"max_loras={self.max_loras} must be at least 1.", "max_loras")
