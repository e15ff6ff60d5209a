"""What does an engine tell about itself?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types, option
from jubako.errors import ConfigError


@dataclass(frozen=True)
class ObservabilityConfig:
    """Statistics and logs."""

    disable_log_stats: bool = option(False, "Gather no statistics.")
    log_stats_interval: float = option(
        10.0, "Seconds between lines about the engine in a server's log; 0 for none."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least serious log line."
    )

    def __post_init__(self) -> None:
        check_types(self)
        if not self.log_stats_interval >= 0:
            raise ConfigError(
                f"log_stats_interval={self.log_stats_interval} must be at least 0.",
                "log_stats_interval",
            )
