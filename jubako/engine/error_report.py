"""How does an error cross from the core's process to the front end's?

As the name of a class of `jubako.errors` and its text. An error that is not of that family crosses
as a plain `JubakoError`, whose text the caller chooses.
"""

from __future__ import annotations

import msgspec

from jubako import errors
from jubako.errors import ERROR_TABLE, JubakoError


class ErrorReport(msgspec.Struct, tag=True):
    """An error of the core."""

    kind: str
    """Name of a class in `jubako.errors`."""
    message: str
    parameter: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException, unexpected: str) -> ErrorReport:
        """Describe `error`; one that is not Jubako's own becomes the text `unexpected`."""
        if not isinstance(error, JubakoError):
            return cls("JubakoError", unexpected)
        kind = next(c.__name__ for c in type(error).__mro__ if c.__name__ in _KINDS)
        return cls(kind, error.message, error.parameter, error.code)

    def to_error(self) -> JubakoError:
        """The error again, with the class that it had."""
        error = _KINDS.get(self.kind, JubakoError)(self.message)
        error.parameter = self.parameter
        if self.code in ERROR_TABLE:
            error.code = self.code
        return error


_KINDS: dict[str, type[JubakoError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, JubakoError)
}
