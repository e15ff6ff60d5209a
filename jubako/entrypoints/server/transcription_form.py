"""What does a form that carries a recording ask for?

Fields are OpenAI's. One that is known but not built is refused unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from starlette.requests import Request

from jubako.entrypoints.server.decoding import read_body, shorten
from jubako.entrypoints.server.errors import ServerError
from jubako.entrypoints.server.state import ServerState
from jubako.errors import NotImplementedFeatureError, ValidationError

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]

MAX_FIELDS = 64
MAX_FIELD_BYTES = 64 * 1024
FORM_BYTES = MAX_FIELDS * MAX_FIELD_BYTES // 4
"""What a form may have beside the recording."""

_PIECE = 256 * 1024

_NOT_BUILT: dict[str, tuple[str, ...]] = {
    "chunking_strategy": ("auto",),
    "include": (),
    "keywords": (),
    "known_speaker_names": (),
    "known_speaker_references": (),
    "languages": (),
    "hotwords": (),
    "max_completion_tokens": (),
    "to_language": ("en",),
    "use_beam_search": ("false",),
    "top_p": ("1", "1.0"),
    "top_k": ("0", "-1"),
    "min_p": ("0", "0.0"),
    "seed": (),
    "frequency_penalty": ("0", "0.0"),
    "presence_penalty": ("0", "0.0"),
    "repetition_penalty": ("1", "1.0"),
    "vllm_xargs": (),
}
"""Field → values that ask for nothing."""

_NO_EFFECT = frozenset({"user", "stream_include_usage", "stream_continuous_usage_stats"})


@dataclass(frozen=True)
class TranscriptionForm:
    """The fields of /v1/audio/transcriptions and /v1/audio/translations."""

    file: bytes
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Format = "json"
    temperature: float = 0.0
    timestamp_granularities: tuple[str, ...] = ()
    stream: bool = False
    unknown: tuple[str, ...] = field(default=())
    """Names of fields that were ignored."""


async def read_form(state: ServerState, request: Request) -> TranscriptionForm:
    """The form in the body of `request`.

    Raises `media_too_large` for a body that no recording within the limits makes, and what else
    is wrong with the form or a field.
    """
    _check_sender(request)
    largest = state.engine.config.multimodal_config.max_audio_bytes
    try:
        body = await read_body(request, state, largest + FORM_BYTES)
    except ServerError as error:
        if error.code != "request_too_large":
            raise
        raise ValidationError(
            f"{error.message} A recording may have {largest} bytes.", "file", code="media_too_large"
        ) from None
    file, fields = await _parse(request, body)
    if file is None:
        raise ValidationError("file is required, as a part of the form with a file name.", "file")
    return _form(file, fields)


def _check_sender(request: Request) -> None:
    """Only forms in parts are read, and none that a page of another origin made.

    Browsers send such forms anywhere without asking first; what they say of their origin tells.
    """
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "multipart/form-data":
        shown = repr(shorten(given)) if given else "none"
        raise ServerError(
            "unsupported_media_type", f"Content-Type must be multipart/form-data, got {shown}."
        )
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ServerError(
            "unsupported_media_type", "Forms from web pages of other origins are not taken."
        )


async def _parse(request: Request, body: bytes) -> tuple[bytes | None, list[tuple[str, str]]]:
    """The file of a form, if it has one, and its other fields in order."""
    from starlette.datastructures import UploadFile
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PIECE):
            yield body[start : start + _PIECE]
        yield b""

    try:
        import python_multipart  # noqa: F401 - starlette needs it
    except ImportError:
        raise NotImplementedFeatureError(
            "This server cannot read forms; install the extra: pip install 'jubako[audio]'."
        ) from None
    parser = MultiPartParser(
        request.headers,
        pieces(),
        max_files=1,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_FIELD_BYTES,
    )
    parser.spool_max_size = len(body) + 1  # nothing goes to disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ValidationError(f"The form cannot be read: {error.message.rstrip('.')}.") from None
    file: bytes | None = None
    fields: list[tuple[str, str]] = []
    try:
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                fields.append((name.removesuffix("[]"), value))
            elif name == "file":
                file = await value.read()
    finally:
        await form.close()
    return file, fields


def _form(file: bytes, fields: list[tuple[str, str]]) -> TranscriptionForm:
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in fields:
        if name == "timestamp_granularities":
            values[name] = (*values.get(name, ()), value)
        elif name in ("model", "language", "prompt", "response_format"):
            if value:
                values[name] = value
        elif name == "temperature":
            values[name] = _number(name, value)
        elif name == "stream":
            values[name] = _truth(name, value)
        elif name in _NOT_BUILT:
            if value and value.lower() not in _NOT_BUILT[name]:
                raise ValidationError(
                    f"{name}={shorten(value)!r} is not supported by this server; leave it out.",
                    name,
                    value,
                    code="unsupported_parameter",
                )
        elif name not in _NO_EFFECT:
            unknown.append(name)
    form = TranscriptionForm(file, **values, unknown=tuple(unknown))
    _check_together(form)
    return form


def _check_together(form: TranscriptionForm) -> None:
    if form.response_format not in get_args(Format):
        raise ValidationError(
            f"response_format={shorten(form.response_format)!r} must be one of "
            f"{', '.join(get_args(Format))}.",
            "response_format",
            form.response_format,
        )
    for granularity in form.timestamp_granularities:
        if granularity != "segment":
            raise ValidationError(
                f"timestamp_granularities={shorten(granularity)!r} must be segment; times of words "
                "are not built.",
                "timestamp_granularities",
                granularity,
                code="unsupported_parameter" if granularity == "word" else None,
            )
    if form.timestamp_granularities and form.response_format != "verbose_json":
        raise ValidationError(
            "timestamp_granularities needs response_format=verbose_json.",
            "timestamp_granularities",
        )
    if form.stream and form.response_format not in ("json", "text"):
        raise ValidationError(
            f"stream=true needs response_format json or text, got {form.response_format}.", "stream"
        )


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValidationError(
            f"{name} must be a number, got {shorten(value)!r}.", name, value
        ) from None


def _truth(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0", ""):
        raise ValidationError(f"{name} must be true or false, got {shorten(value)!r}.", name, value)
    return value.lower() in ("true", "1")
