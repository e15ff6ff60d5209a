"""How does one definition of an option become a flag, an environment variable and a help text?

A field made with `option(...)` in a concern dataclass is the only definition of an option. Its name
with dashes is the command-line flag, `JUBAKO_` plus its name in capitals the environment variable.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union

from jubako.errors import ConfigError

ENV_PREFIX = "JUBAKO_"

MAX_INTEGER = 2**63 - 1
"""Larger numbers fit into no message to the engine core."""


def option(default: Any, help: str, *, flags: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also an option. `flags` are extra spellings of its flag."""
    metadata = {"help": help, "flags": flags}
    return dataclasses.field(default=default, metadata=metadata)


def _base_type(annotation: Any) -> tuple[Any, bool]:
    """The plain type of an annotation and whether None is allowed."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        return members[0], len(members) < len(typing.get_args(annotation))
    return annotation, False


def parse_size(text: str) -> int:
    """Bytes from "4GiB", "500MB", "1024" and the like."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {f"{letter}ib": 1024**power, f"{letter}b": 1000**power, letter: 1024**power}
    number = text.strip().rstrip("KMGTkmgtIiBb ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is not a size; write bytes, or for example 4GiB") from None


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is not a truth value; write true or false")


def convert(field: dataclasses.Field[Any], annotation: Any, text: str) -> Any:
    """The value of `field` written as `text`; ValueError says what is wrong with it."""
    base, optional = _base_type(annotation)
    if optional and text.lower() in ("none", ""):
        return None
    if typing.get_origin(base) is Literal:
        choices = typing.get_args(base)
        for choice in choices:
            if str(choice) == text:
                return choice
        raise ValueError(f"{text!r} is none of {', '.join(map(str, choices))}")
    if typing.get_origin(base) in (tuple, list):
        return tuple(part for part in text.split(",") if part)
    if base is bool:
        return _parse_bool(text)
    if base is int:
        return parse_size(text) if field.name.endswith("bytes") else int(text)
    return base(text)


def fields_of(concern: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The options of a concern, with their types."""
    hints = typing.get_type_hints(concern)
    return [(f, hints[f.name]) for f in dataclasses.fields(concern) if "help" in f.metadata]


def add_arguments(
    parser: argparse.ArgumentParser,
    concerns: Iterable[type],
    env: Mapping[str, str] | None = None,
    skip: Iterable[str] = (),
) -> None:
    """Add one group of flags per concern; defaults come from the environment, then the field."""
    env = os.environ if env is None else env
    for concern in concerns:
        doc = (concern.__doc__ or "").strip().splitlines()[0]
        group = parser.add_argument_group(concern.__name__.removesuffix("Config").lower(), doc)
        for field, annotation in fields_of(concern):
            if field.name not in skip:
                _add_argument(group, field, annotation, env)


def _add_argument(
    group: Any, field: dataclasses.Field[Any], annotation: Any, env: Mapping[str, str]
) -> None:
    base, _ = _base_type(annotation)
    default = field.default
    variable = ENV_PREFIX + field.name.upper()
    if variable in env:
        try:
            default = convert(field, annotation, env[variable])
        except ValueError as error:
            raise ConfigError(f"Environment variable {variable}: {error}.", field.name) from None
    flags = ["--" + field.name.replace("_", "-"), *field.metadata["flags"]]
    text = field.metadata["help"].replace("%", "%%")
    shown = "" if field.default is None else f" (default: {field.default})"
    keywords: dict[str, Any] = {"dest": field.name, "default": default, "help": text + shown}
    if base is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **keywords)
        return

    def parse(value: str) -> Any:
        try:
            return convert(field, annotation, value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    if typing.get_origin(base) is Literal:
        keywords["metavar"] = "{" + ",".join(map(str, typing.get_args(base))) + "}"
    else:
        keywords["metavar"] = field.name.split("_")[-1].upper()
    group.add_argument(*flags, type=parse, **keywords)


def values_of(concern: type, source: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `source` that are fields of `concern`."""
    names = {f.name for f in dataclasses.fields(concern)}
    return {name: value for name, value in source.items() if name in names}


def check_types(config: Any) -> None:
    """Raise `ConfigError` for a field whose value is not of its declared plain type."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        base, optional = _base_type(hints[field.name])
        if value is None and optional:
            continue
        name = f"{field.name}={value!r}"
        if typing.get_origin(base) is Literal:
            if value not in typing.get_args(base):
                choices = ", ".join(map(str, typing.get_args(base)))
                raise ConfigError(f"{name} is none of {choices}.", field.name)
        elif base is float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} must be a number.", field.name)
        elif base in (int, bool, str) and type(value) is not base:
            raise ConfigError(f"{name} must be of type {base.__name__}.", field.name)
        elif base is int and abs(value) > MAX_INTEGER:
            raise ConfigError(f"{name} must be at most {MAX_INTEGER}.", field.name)
