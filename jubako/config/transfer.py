"""How does an engine exchange KV and encoder outputs with others?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types
from jubako.errors import ConfigError


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name}={value} must be above 0 seconds.", name)


@dataclass(frozen=True)
class KVTransferConfig:
    """Transfers of KV, as far as the scheduler decides about them. Times are in seconds."""

    kv_connector: str | None = None
    """Name of the connector; None: KV is not exchanged."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose KV did not arrive."""
    kv_load_timeout_s: float = 60.0
    """A load that has not been reported by then is given up."""
    kv_lookup_timeout_s: float = 2.0
    """A lookup that has not been answered by then counts as one that found nothing."""
    kv_send_timeout_s: float = 480.0
    """Blocks of an ended request that have not been reported as sent by then are used again."""

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "kv_load_timeout_s", "kv_lookup_timeout_s", "kv_send_timeout_s")


@dataclass(frozen=True)
class ECTransferConfig:
    """Transfers of encoder outputs. Times are in seconds."""

    ec_load_timeout_s: float = 5.0
    """An encoder output that has not come by then is computed."""
    ec_send_timeout_s: float = 480.0
    """An encoder output that has not been reported as sent by then may be dropped."""

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "ec_load_timeout_s", "ec_send_timeout_s")
