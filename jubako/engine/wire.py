"""What do the frames on the sockets between front end and core begin with?

Input, front end → core: type byte, msgpack, arrays. Output, core → front end: msgpack, arrays; or
the single frame `ENGINE_CORE_DEAD`.
"""

from __future__ import annotations

import enum

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"


class RequestType(enum.Enum):
    """First frame of an input message."""

    ADD = b"\x00"
    """An `EngineCoreRequest`."""
    ABORT = b"\x01"
    """A list of request ids."""
    UTILITY = b"\x03"
    """A `UtilityCall`."""


def engine_identity(engine_index: int) -> bytes:
    """ZMQ identity of an engine."""
    return engine_index.to_bytes(2, "little")
