"""Which implementation of the kernels is in use?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from jubako.errors import ConfigError
from jubako.kernels.cpu.library import library
from jubako.kernels.interface import Kernels


def _load_reference() -> Kernels:
    from jubako.kernels.reference.kernels import ReferenceKernels

    return ReferenceKernels()


def _load_cpu() -> Kernels:
    from jubako.kernels.cpu.kernels import CpuKernels

    return CpuKernels()


_LOADERS: dict[str, Callable[[], Kernels]] = {"cpu": _load_cpu, "reference": _load_reference}
"""The implementations, best first. A loader imports what it needs."""

_current: Kernels | None = None


def available() -> tuple[str, ...]:
    """Names of the implementations that can run here, best first."""
    return tuple(_LOADERS) if library() is not None else ("reference",)


def set_kernels(name: str = "auto", device_type: str = "cpu") -> Kernels:
    """Use the implementation `name`, or with "auto" the best one for the device, and return it.

    Layers take their kernels when they are built, so this comes before the model. Native ones run
    on as many threads as PyTorch has at this moment. Raises ConfigError for a name that is not
    available.
    """
    global _current
    if name == "auto":
        name = available()[0] if device_type == "cpu" else "reference"
    if name not in available():
        raise ConfigError(
            f"kernels={name!r} is not available here; choose auto or {', '.join(available())}.",
            "kernels",
        )
    if _current is None or _current.name != name:
        _current = _LOADERS[name]()
    _current.use_threads(torch.get_num_threads())
    return _current


def get_kernels() -> Kernels:
    """The implementation in use; the best one if none was set."""
    return _current if _current is not None else set_kernels()
