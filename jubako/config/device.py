"""Where does the model compute?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types, option
from jubako.errors import ConfigError

MAX_THREADS = 1024
"""Far more than help; with very many, OpenMP ends the process without a word."""


@dataclass(frozen=True)
class DeviceConfig:
    """The device and its threads."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where to compute. auto: a CUDA device if PyTorch finds one, else the CPU."
    )
    num_threads: int | None = option(None, "Threads that compute (default: one per core).")
    kernels: Literal["auto", "cpu", "reference"] = option(
        "auto",
        "Which implementation of the kernels. cpu: native code; reference: PyTorch's operators; "
        "auto: native code on a CPU where it was built.",
    )
    weight_cache: str = option(
        "auto",
        "Folder that keeps weights as the native kernels read them, for the next start. auto: in "
        "Jubako's cache folder; off: nothing is kept.",
    )
    weight_cache_bytes: int = option(
        16 * 2**30,
        "Most that --weight-cache takes, for example 20GiB; the least recently used go first.",
    )

    def __post_init__(self) -> None:
        check_types(self)
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_THREADS:
            raise ConfigError(
                f"num_threads={self.num_threads} must be at least 1 and at most {MAX_THREADS}.",
                "num_threads",
            )
        if not self.weight_cache.strip():
            raise ConfigError(
                "weight_cache is empty; give a folder, or auto or off.", "weight_cache"
            )
        if self.weight_cache_bytes < 0:
            raise ConfigError(
                f"weight_cache_bytes={self.weight_cache_bytes} must be at least 0.",
                "weight_cache_bytes",
            )
