"""Which implementation of the kernels is in use?"""

from __future__ import annotations

from collections.abc import Callable

from jubako.errors import ConfigError
from jubako.kernels.interface import Kernels


def _load_reference() -> Kernels:
    from jubako.kernels.reference.kernels import ReferenceKernels

    return ReferenceKernels()


_LOADERS: dict[str, Callable[[], Kernels]] = {"reference": _load_reference}
"""Implementations that can run on this machine, best first. A loader imports what it needs."""

_current: Kernels | None = None


def available() -> tuple[str, ...]:
    """Names of the implementations that can run here, best first."""
    return tuple(_LOADERS)


def set_kernels(name: str = "auto") -> Kernels:
    """Use the implementation `name`, or with "auto" the best one, and return it.

    Layers take their kernels when they are built, so this comes before the model. Raises
    ConfigError for a name that is not available.
    """
    global _current
    if name == "auto":
        name = available()[0]
    if name not in _LOADERS:
        raise ConfigError(
            f"kernels={name!r} is not available here; choose auto or {', '.join(available())}.",
            "kernels",
        )
    if _current is None or _current.name != name:
        _current = _LOADERS[name]()
    return _current


def get_kernels() -> Kernels:
    """The implementation in use; the best one if none was set."""
    return _current if _current is not None else set_kernels()
