"""When did what happen in a command? Runs it, and writes the times to a file.

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import time

_began = time.monotonic()

import json  # noqa: E402 - the clock comes first
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from importlib.machinery import PathFinder  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


class _AfterImport:
    """Lets a function wrap what is in a module once the command has imported it, in its order."""

    def __init__(self, name: str, wrap: Callable[[Any], None]) -> None:
        self._name = name
        self._wrap = wrap

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, with the wrapping behind its execution."""
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._wrap(module)

        loader.exec_module = exec_module
        return spec


def _wrap_engine(module: Any, moments: dict[str, float], lengths: dict[str, float]) -> None:
    make = module.LLMEngine.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        moments["front end imported"] = time.monotonic()
        make(self, *arguments, **options)
        moments["engine ready"] = time.monotonic()
        for stage, seconds in self.ready.startup_seconds.items():
            lengths[f"core {stage}"] = seconds

    module.LLMEngine.__init__ = init


def _wrap_startup(module: Any, moments: dict[str, float], lengths: dict[str, float]) -> None:
    read = module.load_tokenizer

    def load_tokenizer(*arguments: Any) -> Any:
        began = time.monotonic()
        tokenizer = read(*arguments)
        moments["tokeniser read"] = time.monotonic()
        lengths["tokeniser"] = moments["tokeniser read"] - began
        return tokenizer

    module.load_tokenizer = load_tokenizer


def main(argv: list[str]) -> int:
    """Run the command `argv[1:]` and write its times to the file `argv[0]`."""
    path = Path(argv[0])
    moments, lengths = {"interpreter started": _began}, dict[str, float]()
    from jubako.entrypoints.cli import main as command

    moments["command line imported"] = time.monotonic()
    for name, wrap in (("llm_engine", _wrap_engine), ("startup", _wrap_startup)):
        finder = _AfterImport(
            f"jubako.frontend.{name}", partial(wrap, moments=moments, lengths=lengths)
        )
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    code = command(argv[1:])
    path.write_text(json.dumps({"moments": moments, "lengths": lengths}))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
