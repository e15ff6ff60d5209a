"""One file a family: which tiny random models are rows of the exactness matrix.

Each file has `CONFIGS`: name → a function that makes a transformers configuration. It may have
`EXCEPTIONS`: name → column → why that cell does not apply to that model, and `PREPARE`: name → a
function that changes the random weights of that model, so that its answers depend on its input.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any


def _files() -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(__path__):
        yield import_module(f"{__name__}.{module.name}")


def collect() -> dict[str, Any]:
    """The configurations of all files."""
    found: dict[str, Any] = {}
    for module in _files():
        found |= module.CONFIGS
    return found


def exceptions() -> dict[str, dict[str, str]]:
    """The exceptions of all files."""
    found: dict[str, dict[str, str]] = {}
    for module in _files():
        found |= getattr(module, "EXCEPTIONS", {})
    return found


def prepare(name: str, model: Any) -> None:
    """Change the random weights of row `name` as its file says."""
    for module in _files():
        change = getattr(module, "PREPARE", {}).get(name)
        if change is not None:
            change(model)
