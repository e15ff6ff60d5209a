"""How much may media that users send take?"""

from __future__ import annotations

from dataclasses import dataclass

from jubako.config.options import check_types, option
from jubako.errors import ConfigError


@dataclass(frozen=True)
class MultiModalConfig:
    """Limits of media in requests; what exceeds them is refused before or while it is decoded."""

    max_audio_bytes: int = option(
        25 * 1024 * 1024, "Largest file of a recording, as it is sent or stored."
    )
    max_audio_decode_duration_s: float = option(
        600.0, "Longest recording in seconds, whatever its file says about itself."
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_audio_bytes", "max_audio_decode_duration_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.", name)
