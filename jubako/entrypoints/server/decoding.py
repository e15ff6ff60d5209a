"""How does a request body become a request record, and what is said when it does not?

Fields are taken as they are, without conversion between types. An unknown field is reported back to
the caller as ignored; one that is known but not built is refused unless its value asks for nothing.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from jubako.entrypoints.server.errors import ServerError
from jubako.entrypoints.server.messages_protocol import MESSAGES_NOT_BUILT
from jubako.entrypoints.server.pooling_protocol import POOLING_NOT_BUILT
from jubako.entrypoints.server.protocol import (
    NO_EFFECT,
    NOT_BUILT,
    OLD_NAMES,
    GenerationRequest,
)
from jubako.entrypoints.server.responses_protocol import RESPONSES_NOT_BUILT
from jubako.entrypoints.server.state import BodyBudget, ServerState
from jubako.errors import ValidationError

Record = TypeVar("Record", bound=msgspec.Struct)

_NOT_BUILT = NOT_BUILT | POOLING_NOT_BUILT | MESSAGES_NOT_BUILT | RESPONSES_NOT_BUILT
_SHOWN_CHARACTERS = 60
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MESSAGE = re.compile(r"(?P<problem>.*?)(?: - at (?P<path>.*))?", re.DOTALL)
_MISMATCH = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `[^`]*`")
_BOUND = re.compile(r"Expected `int` (?P<bound>[<>]= -?\d+)")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")


async def read_body(request: Request, state: ServerState, limit: int) -> bytes:
    """The body, of at most `limit` bytes; a larger one is refused as soon as that is known.

    While it is being read it counts against what the server has for bodies, and it has to be there
    in time.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit, int(announced))
    seconds = state.config.body_timeout
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, state.bodies, limit)
    except TimeoutError:
        raise ServerError(
            "request_timeout", f"The body did not arrive within {seconds:g} seconds."
        ) from None


async def _read(request: Request, budget: BodyBudget, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while True:
            message = await request.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            part = message.get("body", b"")
            if size + len(part) > limit:
                raise _too_large(limit)
            budget.take(len(part))
            size += len(part)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)
    finally:
        budget.give_back(size)


def _too_large(limit: int, size: int | None = None) -> ServerError:
    got = "The body" if size is None else f"The body of {size} bytes"
    return ServerError("request_too_large", f"{got} exceeds the limit of {limit} bytes.")


def check_media_type(request: Request) -> None:
    """Only JSON in UTF-8 is read.

    Anything else is refused, a missing type too: a web page of another origin can send every type
    but this one to a server on the same machine without asking it first.
    """
    given = request.headers.get("content-type", "")
    media_type, _, options = given.partition(";")
    media_type = media_type.strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    charset = options.partition("charset=")[2].strip().strip('"').lower()
    if not is_json or charset not in ("", "utf-8", "utf8"):
        shown = f"{shorten(given)!r}" if given else "none"
        raise ServerError(
            "unsupported_media_type",
            f"Content-Type must be application/json, got {shown}.",
        )


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` holds."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ServerError("invalid_json", "The body's JSON is nested too deeply.") from None
    except ValueError as error:
        # Where it was is said as a byte; how the decoder counts levels helps nobody.
        detail = str(error).removeprefix("JSON is malformed: ").partition(" - at `")[0]
        raise ServerError("invalid_json", f"The body is not valid JSON: {detail}.") from None
    if not isinstance(value, dict):
        raise ServerError("invalid_json", f"The body must be a JSON object, got {_kind(value)}.")
    return value


def decode(body: bytes, record: type[Record]) -> tuple[Record, list[str]]:
    """The request that `body` holds, and the names of its unknown fields.

    Raises `ServerError` for bad JSON and `ValidationError` for a field of the wrong type or one
    that is not built.
    """
    value = parse_object(body)
    unknown: list[str] = []
    not_built = _NOT_BUILT[record]
    for name, given in value.items():
        if name in record.__struct_fields__ or name in NO_EFFECT:
            continue
        if name in OLD_NAMES and issubclass(record, GenerationRequest) and given is not None:
            raise ValidationError(
                f"{name} is not supported; use {OLD_NAMES[name]} instead.",
                name,
                code="unsupported_parameter",
            )
        if name not in not_built:
            unknown.append(name)
        elif given is not None and not any(_same(given, v) for v in not_built[name]):
            raise ValidationError(
                f"{name}={_show(given)} is not supported by this server; leave it out.",
                name,
                given,
                code="unsupported_parameter",
            )
    try:
        return msgspec.convert(value, record), unknown
    except msgspec.ValidationError as error:
        raise _field_error(str(error), value) from None


def _same(given: Any, neutral: Any) -> bool:
    return type(given) is type(neutral) and given == neutral


def _field_error(text: str, body: dict[str, Any]) -> ValidationError:
    match = _MESSAGE.fullmatch(text)
    assert match is not None
    problem, path = match["problem"], match["path"] or ""
    value: Any = body
    name = shown = ""
    for field, index in _STEP.findall(path):
        if index == "...":
            # Some value of a map; which one is not said.
            shown = ""
            break
        name += f"[{index}]" if index else ("." if name else "") + field
        try:
            value = value[field] if field else value[int(index)]
        except (KeyError, IndexError, TypeError):
            value = None
        shown = f", got {_kind(value)}: {_show(value)}"
    if problem == "Number out of range":
        # It was read whole, so it is an integer that no float can hold.
        problem = f"Expected `float`, got `{problem}`"
    if missing := _MISSING.match(problem):
        name += ("." if name else "") + missing["field"]
        return ValidationError(f"{name} is required.", name)
    if bound := _BOUND.match(problem):
        wanted = f"an integer {bound['bound']}"
    elif mismatch := _MISMATCH.match(problem):
        names = [_TYPE_NAMES.get(t, t) for t in mismatch["wanted"].split(" | ")]
        wanted = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    else:
        return ValidationError(f"{name or 'The body'}: {problem}.", name or None, value)
    return ValidationError(f"{name} must be {wanted}{shown}.", name, value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for types, name in (
        (bool, "a truth value"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    ):
        if isinstance(value, types):
            return name
    return "a value"


def shorten(text: str) -> str:
    """`text`, cut to a length that fits into a message."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _show(value: Any) -> str:
    """JSON of `value`, shortened; a long value is not encoded whole."""
    if isinstance(value, list) and value:
        return "[...]"
    if isinstance(value, dict) and value:
        return "{...}"
    if isinstance(value, str):
        value = value[: _SHOWN_CHARACTERS + 1]
    return shorten(msgspec.json.encode(value).decode())
