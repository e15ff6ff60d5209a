"""Which methods of the core may a front end call, and with what types?

A call is answered between two steps. Only the methods of `UTILITY_METHODS` can be called; arguments
and results are checked against it on both sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from jubako.errors import JubakoError
from jubako.scheduler.features import LoRARequest

DEFAULT_UTILITY_TIMEOUT = 60.0
"""Seconds. Longer than any step should take, since a call waits for the end of one."""


class UtilityTimeoutError(JubakoError, TimeoutError):
    """The core did not answer a utility call in time; it may still do what was asked."""


class UtilityMethod(NamedTuple):
    """Types of a method's arguments, in order, and of its result."""

    arguments: tuple[Any, ...]
    result: Any
    num_required: int = 0
    """Arguments without a default; they come first."""


UTILITY_METHODS: dict[str, UtilityMethod] = {
    "add_lora": UtilityMethod((LoRARequest,), bool, num_required=1),
    "check_health": UtilityMethod((), bool),
    "execute_dummy_batch": UtilityMethod((), None),
    "get_request_counts": UtilityMethod((), tuple[int, int]),
    "get_supported_tasks": UtilityMethod((), list[str]),
    "is_scheduler_paused": UtilityMethod((), bool),
    "list_loras": UtilityMethod((), set[int]),
    "pause_scheduler": UtilityMethod((), None),
    "pin_lora": UtilityMethod((int,), bool, num_required=1),
    "profile": UtilityMethod((bool,), None),
    "remove_lora": UtilityMethod((int,), bool, num_required=1),
    "reset_encoder_cache": UtilityMethod((), None),
    "reset_mm_cache": UtilityMethod((), None),
    "reset_prefix_cache": UtilityMethod((bool, bool), bool),
    "resume_scheduler": UtilityMethod((), None),
    "sleep": UtilityMethod((int,), None),
    "wake_up": UtilityMethod((list[str] | None,), None),
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
    types, _, num_required = utility_method(name)
    if not num_required <= len(args) <= len(types):
        wanted = f"{num_required} to {len(types)}" if num_required < len(types) else len(types)
        raise JubakoError(f"{name} takes {wanted} arguments, got {len(args)}.")
    try:
        return [msgspec.convert(a, t) for a, t in zip(args, types)]
    except msgspec.ValidationError as error:
        raise JubakoError(f"{name}: {error}.") from None
