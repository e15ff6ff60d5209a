"""What do the entries of config.json hold?

Anybody may have written it: an entry is what it must be, or an error says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jubako.errors import CheckpointError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
"""No model has more; building one would only take time and memory."""
_COUNTS_OF_LAYERS = frozenset(
    ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers")
)


def value(hf_config: Mapping[str, Any], name: str, default: Any, least: int = 1) -> Any:
    """The entry `name`, or `default` where it is absent or null.

    `CheckpointError` for one of another kind than `default`: for an integer it is an integer of at
    least `least`, for a float a number above 0, else a truth value or a string.
    """
    entry = hf_config.get(name)
    if entry is None:
        entry = default
    wanted = _fault(name, entry, default, least)
    if wanted:
        raise CheckpointError(f"{name} in config.json must be {wanted}, got {show(entry)}.")
    return entry


def _fault(name: str, entry: Any, default: Any, least: int) -> str | None:
    """What `entry` should be, if it is not."""
    if isinstance(default, bool):
        return None if isinstance(entry, bool) else "true or false"
    number = isinstance(entry, int | float) and not isinstance(entry, bool)
    if isinstance(default, int):
        most = MAX_LAYERS if name in _COUNTS_OF_LAYERS else MAX_SIZE
        fits = number and isinstance(entry, int) and least <= entry <= most
        return None if fits else f"an integer from {least} to {most}"
    if isinstance(default, float):
        fits = number and 0 < entry < math.inf
        return None if fits else "a number above 0"
    if isinstance(default, str):
        return None if isinstance(entry, str) else "a string"
    return None


def number_or_none(hf_config: Mapping[str, Any], name: str) -> float | None:
    """The number `name`; None where it is absent or null. `CheckpointError` for anything else."""
    return None if hf_config.get(name) is None else float(value(hf_config, name, 1.0))


def integer_or_none(hf_config: Mapping[str, Any], name: str) -> int | None:
    """The positive integer `name`; None where it is absent or null."""
    entry: int | None = None
    if hf_config.get(name) is not None:
        entry = value(hf_config, name, 1)
    return entry


def mapping(hf_config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object `name`, empty where it is absent or null. `CheckpointError` for anything else."""
    entry = hf_config.get(name)
    if entry is None:
        return {}
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{name} in config.json must be an object, got {show(entry)}.")
    return entry


def show(entry: Any) -> str:
    """The entry as an error shows it."""
    text = repr(entry)
    return text if len(text) <= 60 else text[:60] + "..."
