"""How does an error look to an HTTP client?

Every error has one shape, OpenAI's: `{"error": {"message", "type", "param", "code"}}`. Status and
type follow from the code by `jubako.errors.ERROR_TABLE`; nothing else decides a status.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jubako.errors import ERROR_TABLE, EngineBusyError, JubakoError

logger = logging.getLogger(__name__)

UNEXPECTED = "The server failed to answer this request; its log has the details."
BUSY_RETRY_SECONDS = 1
UNAVAILABLE_RETRY_SECONDS = 5

_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ErrorInfo(msgspec.Struct):
    """What was wrong. `param` is the field at fault, `code` a word of the error table."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    """The body of every response that is not a success."""

    error: ErrorInfo


class ServerError(JubakoError):
    """An error that the HTTP layer itself finds, with its code."""

    def __init__(self, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message, parameter)
        self.code = code


def error_info(error: BaseException) -> ErrorInfo:
    """What a client may know about `error`; an unexpected one is logged and not shown."""
    if isinstance(error, JubakoError) and error.code in ERROR_TABLE:
        message, param, code = error.message, error.parameter, error.code
    elif isinstance(error, HTTPException) and error.status_code in _CODE_OF_STATUS:
        code = _CODE_OF_STATUS[error.status_code]
        message, param = HTTPStatus(error.status_code).phrase + ".", None
    else:
        logger.error("Unexpected error in a request", exc_info=error)
        message, param, code = UNEXPECTED, None, "internal_error"
    return ErrorInfo(message, ERROR_TABLE[code].type, param, code)


def error_headers(error: BaseException, code: str) -> dict[str, str]:
    """Headers that go with an error: when to try again, and what would have been allowed."""
    if isinstance(error, EngineBusyError):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, HTTPException) and error.headers:
        return {k: v for k, v in error.headers.items() if k.lower() == "allow"}
    status = ERROR_TABLE[code].status
    if status == 429:
        return {"Retry-After": str(BUSY_RETRY_SECONDS)}
    if status == 503:
        return {"Retry-After": str(UNAVAILABLE_RETRY_SECONDS)}
    if status == 408:
        # What is left of the body would be taken for the next request.
        return {"Connection": "close"}
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}


def error_body(error: BaseException) -> bytes:
    """The JSON of `error`, for an event in a stream whose status has already gone out."""
    return msgspec.json.encode(ErrorResponse(error_info(error)))


MESSAGES_PATH = "/v1/messages"
"""Below it errors have Anthropic's shape."""

_MESSAGES_TYPES = {"server_error": "api_error"}


class MessagesError(msgspec.Struct, kw_only=True):
    """Anthropic's shape of an error, with the same `error` inside."""

    type: str = "error"
    error: ErrorInfo


def messages_error_body(error: BaseException) -> bytes:
    """The JSON of `error` in Anthropic's shape."""
    return _messages_error(error_info(error))


def _messages_error(info: ErrorInfo) -> bytes:
    kind = "overloaded_error" if ERROR_TABLE[info.code].status == 503 else info.type
    info.type = _MESSAGES_TYPES.get(kind, kind)
    return msgspec.json.encode(MessagesError(error=info))


def error_response(error: BaseException, path: str = "") -> Response:
    """The whole HTTP response for `error`, which a request to `path` ran into."""
    info = error_info(error)
    anthropic = path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")
    return Response(
        _messages_error(info) if anthropic else msgspec.json.encode(ErrorResponse(info)),
        ERROR_TABLE[info.code].status,
        headers=error_headers(error, info.code),
        media_type="application/json",
    )
