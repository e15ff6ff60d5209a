"""Which errors does Jubako raise, and how does each look over HTTP?

Every error that a user can cause is a `JubakoError` with a `code`: one word that the HTTP layer
puts into OpenAI's error shape. `ERROR_TABLE` gives each word its HTTP status and `type`, once.
"""

from __future__ import annotations

from typing import NamedTuple


class ErrorKind(NamedTuple):
    """HTTP status and OpenAI `type` of an error code."""

    status: int
    type: str


_BAD_REQUEST = "invalid_request_error"

ERROR_TABLE: dict[str, ErrorKind] = {
    "invalid_value": ErrorKind(400, _BAD_REQUEST),
    "invalid_json": ErrorKind(400, _BAD_REQUEST),
    "unsupported_parameter": ErrorKind(400, _BAD_REQUEST),
    "context_length_exceeded": ErrorKind(400, _BAD_REQUEST),
    "unsupported_task": ErrorKind(400, _BAD_REQUEST),
    "invalid_api_key": ErrorKind(401, "authentication_error"),
    "model_not_found": ErrorKind(404, "not_found_error"),
    "not_found": ErrorKind(404, "not_found_error"),
    "method_not_allowed": ErrorKind(405, _BAD_REQUEST),
    "request_timeout": ErrorKind(408, _BAD_REQUEST),
    "request_too_large": ErrorKind(413, _BAD_REQUEST),
    "unsupported_media_type": ErrorKind(415, _BAD_REQUEST),
    "media_too_large": ErrorKind(413, _BAD_REQUEST),
    "media_unsupported": ErrorKind(415, _BAD_REQUEST),
    "media_undecodable": ErrorKind(422, _BAD_REQUEST),
    "rate_limit_exceeded": ErrorKind(429, "rate_limit_error"),
    "internal_error": ErrorKind(500, "server_error"),
    "not_implemented": ErrorKind(501, "server_error"),
    "engine_dead": ErrorKind(503, "server_error"),
    "starting": ErrorKind(503, "server_error"),
    "draining": ErrorKind(503, "server_error"),
}
"""Error code → HTTP status and type. A code that is not in the table is a defect of the server."""


class JubakoError(Exception):
    """Base of every error that Jubako raises on purpose.

    `code` is a key of `ERROR_TABLE`; `parameter` is the field at fault, if there is one. The
    message says what was wrong, the value, the limit and what to do; it never holds a path of the
    server, a stack or another request's data.
    """

    code = "internal_error"

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter


class ValidationError(JubakoError, ValueError):
    """A request or an option has a value that cannot be used.

    `parameter` names the field, `value` is what it held. `code` may be narrowed, for example to
    `context_length_exceeded`.
    """

    code = "invalid_value"

    def __init__(
        self,
        message: str,
        parameter: str | None = None,
        value: object = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, parameter)
        self.value = value
        if code is not None:
            self.code = code


class ModelNotFoundError(JubakoError):
    """No model is at the given place, or none is served under the given name."""

    code = "model_not_found"


class UnsupportedModelError(JubakoError):
    """The checkpoint is readable, but its architecture, a tensor or a setting is not supported."""

    code = "not_implemented"


class CheckpointError(JubakoError):
    """A checkpoint is damaged: a file is missing, cut short, or a tensor has the wrong shape."""

    code = "invalid_value"


class ConfigError(JubakoError, ValueError):
    """The options of an engine do not fit together, the model, or the machine."""

    code = "invalid_value"


class EngineBusyError(JubakoError):
    """A limit on queued requests or tokens is reached; try again after `retry_after` seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(JubakoError):
    """The engine core has ended; nothing sent to this engine will be answered any more."""

    code = "engine_dead"

    def __init__(
        self, message: str = "The engine core has stopped; restart the server to continue."
    ) -> None:
        super().__init__(message)


class EngineGenerateError(JubakoError):
    """One request failed inside the engine; others go on."""

    code = "internal_error"


class NotImplementedFeatureError(JubakoError):
    """Known to the interface, but not built."""

    code = "not_implemented"
