"""Which options does a configuration file set?

A YAML file of flags without their dashes: `max-model-len: 4096`, or with underscores. The command
line stands above the environment, the environment above the file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jubako.config.options import ENV_PREFIX, convert, fields_of
from jubako.errors import ConfigError

MAX_BYTES = 1024 * 1024


def file_values(
    path: str, concerns: Iterable[type], env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Option → value of those that the file sets and the environment does not.

    Raises `ConfigError` for a file that cannot be read, a name that is no option of `concerns`, and
    a value of a type that no option has.
    """
    env = os.environ if env is None else env
    fields = {field.name: (field, hint) for c in concerns for field, hint in fields_of(c)}
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{path}: {key!r} is no option here{_nearest(name, fields)}.", name)
        field, hint = fields[name]
        if isinstance(value, str):
            try:
                value = convert(field, hint, value)
            except ValueError as error:
                raise ConfigError(f"{path}: {key}: {error}.", name) from None
        elif isinstance(value, list):
            value = tuple(value)
        if ENV_PREFIX + name.upper() not in env:
            values[name] = value
    return values


def _read(path: str) -> dict[Any, Any]:
    import yaml

    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror}.", "config") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path!r} is longer than {MAX_BYTES} bytes.", "config")
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        said = str(error).splitlines()
        raise ConfigError(f"{path!r} is not YAML: {'; '.join(said[:2])}.", "config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path!r} must hold options and their values.", "config")
    return content


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}" if near else ""
