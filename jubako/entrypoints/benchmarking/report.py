"""What does the report of a benchmark hold, and how is it shown?"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jubako import __version__
from jubako.errors import ConfigError
from jubako.utils import cpu
from jubako.utils.versions import installed_versions

_LIBRARIES = ("torch", "numpy", "tokenizers", "httpx")


def environment() -> dict[str, Any]:
    """The machine and the versions, and how busy the machine is."""
    return {
        "jubako": __version__,
        "python": platform.python_version(),
        "libraries": installed_versions(_LIBRARIES),
        "system": platform.platform(),
        "cpu": cpu.processor_name(),
        "cores": cpu.num_cores(),
        "memory_bytes": cpu.total_memory(),
        "load_average": list(os.getloadavg()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def make_report(
    benchmark: str, options: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The report as plain values; `options` are those that were set."""
    return {
        "benchmark": benchmark,
        "environment": environment(),
        "options": {k: v for k, v in options.items() if v is not None},
        "results": list(results),
    }


def check_writable(path: str | None, option: str) -> None:
    """Refuse a file in a folder that does not exist before anything is measured."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{option}={path!r}: there is no such folder; make it first.", option)


def write_report(report: Mapping[str, Any], path: str | None) -> None:
    """Write the report as JSON where a path is given."""
    if path is not None:
        Path(path).write_text(json.dumps(report, indent=1, default=str) + "\n")


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output; numbers have three digits or more."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells)]
    for row in (list(titles), *cells):
        first, *rest = row
        line = [first.ljust(widths[0])] + [c.rjust(w) for c, w in zip(rest, widths[1:])]
        print("  ".join(line).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
