"""Which methods of the core may a front end call, and with what types?

A call is answered between two steps. Only the methods of `UTILITY_METHODS` can be called; arguments
and results are checked against it on both sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from jubako.errors import JubakoError

DEFAULT_UTILITY_TIMEOUT = 60.0
"""Seconds. Longer than any step should take, since a call waits for the end of one."""


class UtilityTimeoutError(JubakoError, TimeoutError):
    """The core did not answer a utility call in time; it may still do what was asked."""


class UtilityMethod(NamedTuple):
    """Types of a method's arguments, in order and each with a default, and of its result."""

    arguments: tuple[Any, ...]
    result: Any


UTILITY_METHODS: dict[str, UtilityMethod] = {
    "check_health": UtilityMethod((), bool),
    "get_request_counts": UtilityMethod((), tuple[int, int]),
    "get_supported_tasks": UtilityMethod((), list[str]),
    "reset_prefix_cache": UtilityMethod((bool, bool), bool),
}
"""Name → signature of everything that a front end may call on `EngineCore`."""


class UtilityCall(msgspec.Struct, array_like=True):
    """The body of a utility message."""

    client_index: int
    call_id: int
    method: str
    args: list[Any] = []


def utility_method(name: str) -> UtilityMethod:
    """The signature of an exported method; `JubakoError` for any other name."""
    try:
        return UTILITY_METHODS[name]
    except KeyError:
        raise JubakoError(f"The engine core has no utility method {name!r}.") from None


def convert_arguments(name: str, args: list[Any]) -> list[Any]:
    """`args` as the types that `name` declares; `JubakoError` if they do not fit."""
    types = utility_method(name).arguments
    if len(args) > len(types):
        raise JubakoError(f"{name} takes {len(types)} arguments, got {len(args)}.")
    try:
        return [msgspec.convert(a, t) for a, t in zip(args, types)]
    except msgspec.ValidationError as error:
        raise JubakoError(f"{name}: {error}.") from None
