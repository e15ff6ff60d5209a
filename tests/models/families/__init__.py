"""One file a family: which tiny random models stand for it in the tests of models.

Each file has `CONFIGS`: name → (transformers class, a function that makes its configuration), or
the same under `ENCODER_DECODERS`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any


def collect(kind: str = "CONFIGS") -> dict[str, tuple[type, Any]]:
    """The configurations of all files, under that name."""
    found: dict[str, tuple[type, Any]] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= getattr(import_module(f"{__name__}.{module.name}"), kind, {})
    return found
