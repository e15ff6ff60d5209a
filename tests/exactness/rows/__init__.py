"""One file a family: which tiny random models are rows of the exactness matrix.

Each file has `CONFIGS`: name → a function that makes a transformers configuration.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any


def collect() -> dict[str, Any]:
    """The configurations of all files."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= import_module(f"{__name__}.{module.name}").CONFIGS
    return found
