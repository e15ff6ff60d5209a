"""What does an engine tell about itself?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types, option


@dataclass(frozen=True)
class ObservabilityConfig:
    """Statistics and logs."""

    disable_log_stats: bool = option(False, "Gather no statistics.")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least serious log line."
    )

    def __post_init__(self) -> None:
        check_types(self)
