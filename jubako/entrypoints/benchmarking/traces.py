"""How does a file of recorded requests become a workload?

Two formats: JSON lines with `timestamp` (milliseconds), `input_length`, `output_length` and
`hash_ids` (one for each 512 prompt tokens; equal ones mean equal text), as Mooncake publishes them;
and CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`, as Azure does.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from jubako.entrypoints.benchmarking.workloads import TRACE_BLOCK, RequestShape, Workload
from jubako.errors import ConfigError

_FRACTION_DIGITS = 6


def read_trace(path: Path, limit: int | None = None, seed: int = 0) -> Workload:
    """The first `limit` requests of a trace; arrivals count from the first.

    Raises ConfigError, with the line, for what is no such trace.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"num_prompts={limit} must be at least 1.", "num_prompts")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            shapes = list(itertools.islice(_shapes(file, path), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={str(path)!r} cannot be read: {error}.", "trace") from None
    if not shapes:
        raise ConfigError(f"trace={str(path)!r} has no requests.", "trace")
    start = shapes[0].arrival
    moved = (
        RequestShape(s.input_len, s.output_len, max(0.0, s.arrival - start), s.blocks)
        for s in shapes
    )
    return Workload(path.name, tuple(moved), seed)


def _shapes(file: IO[str], path: Path) -> Iterator[RequestShape]:
    if path.suffix == ".csv":
        rows = csv.DictReader(file)
        parse, items = _azure, enumerate(rows, 2)
    else:
        lines = (line for line in file if line.strip())
        parse, items = _mooncake, enumerate(map(_json, lines), 1)  # type: ignore[assignment]
    number = 0
    try:
        for number, item in items:
            yield parse(item, number)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"trace={str(path)!r}, after line {number}: {type(error).__name__} {error}; wanted are "
            "timestamp, input_length, output_length (and hash_ids), or TIMESTAMP, ContextTokens, "
            "GeneratedTokens.",
            "trace",
        ) from None


def _json(line: str) -> dict[str, object]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("a line that is no object")
    return value


def _mooncake(row: dict[str, str], number: int) -> RequestShape:
    length, output = int(row["input_length"]), int(row["output_length"])
    blocks = tuple(int(block) for block in row.get("hash_ids") or ())
    _check(length, output)
    missing = -(-length // TRACE_BLOCK) - len(blocks)
    # Text that no hash names is nobody else's.
    blocks += tuple(-(number << 20) - i - 1 for i in range(max(0, missing)))
    return RequestShape(length, output, float(row["timestamp"]) / 1000, blocks)


def _azure(row: dict[str, str], number: int) -> RequestShape:
    length, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    _check(length, output)
    date, _, fraction = row["TIMESTAMP"].partition(".")
    moment = datetime.fromisoformat(f"{date}+00:00").timestamp()
    seconds = moment + float(f"0.{fraction[:_FRACTION_DIGITS] or 0}")
    blocks = tuple(-(number << 20) - i - 1 for i in range(-(-length // TRACE_BLOCK)))
    return RequestShape(length, output, seconds, blocks)


def _check(input_len: int, output_len: int) -> None:
    if input_len < 1 or output_len < 1:
        raise ValueError(f"lengths {input_len} and {output_len}, which must be at least 1")
