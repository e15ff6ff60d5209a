"""How long from the start of a process to the first token of `jubako generate`?

Each run is a fresh process of the command itself, with a few functions wrapped that note the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jubako.entrypoints.benchmarking.figures import spread
from jubako.errors import JubakoError

PROBE = "jubako.entrypoints.benchmarking.startup_probe"


def measure_once(arguments: Sequence[str]) -> dict[str, float]:
    """Seconds from the start of `jubako generate ARGUMENTS` to what happened in it.

    `tokeniser` and `core ...` are lengths and lie side by side; the others are moments.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = [sys.executable, "-m", PROBE, str(path), "generate", *arguments]
        began = time.monotonic()
        with subprocess.Popen(  # noqa: S603 - the command is made here
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            ended = time.monotonic()
            _, log = process.communicate()
        if not first or not path.is_file():
            raise JubakoError(f"jubako generate gave no token: {log.decode(errors='replace')}")
        times = json.loads(path.read_text())
    moments = {name: value - began for name, value in times["moments"].items()}
    return moments | times["lengths"] | {"first token": ended - began}


def measure(arguments: Sequence[str], *, num_runs: int, cold: bool) -> list[dict[str, Any]]:
    """Median and spread by phase, with a warm file cache, and with a cold one if asked for."""
    measure_once(arguments)
    results = [_many("warm", arguments, num_runs, [])]
    if cold:
        results.append(_many("cold", arguments, num_runs, _files_read(arguments)))
    return results


def _many(
    name: str, arguments: Sequence[str], num_runs: int, evicted: Sequence[Path]
) -> dict[str, Any]:
    runs = []
    for _ in range(num_runs):
        drop_from_cache(evicted)
        runs.append(measure_once(arguments))
    phases = {phase: spread([run[phase] for run in runs]) for phase in runs[0]}
    return {"file_cache": name, "seconds": phases}


def drop_from_cache(files: Sequence[Path]) -> None:
    """Ask the system to forget what it holds of these files; it keeps what others use."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files_read(arguments: Sequence[str]) -> list[Path]:
    from jubako.checkpoint.info import open_checkpoint
    from jubako.utils.paths import cache_dir

    model = None
    if "--model" in arguments:
        model = arguments[arguments.index("--model") + 1]
    checkpoint = open_checkpoint(model)
    files = [checkpoint.path] if checkpoint.path.is_file() else list(checkpoint.path.iterdir())
    files += (cache_dir() / "tokenizers").glob("*.json")
    folder = Path(next(p for p in sys.path if (Path(p) / "torch" / "lib").is_dir()))
    files += (folder / "torch" / "lib").iterdir()
    return [path for path in files if path.is_file()]
