"""How does a package offer names without loading its modules before one of them is used?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def exports_on_use(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> Callable[[str], Any]:
    """The `__getattr__` of a package that offers `names`, defined in its `modules`.

    Who imports one module of the package loads that one; the first use of any of the names loads
    all `modules`.
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace = vars(sys.modules[package])
        for module in modules:
            found = vars(import_module(f"{package}.{module}"))
            namespace.update((n, found[n]) for n in names if n in found)
        return namespace[name]

    return load
