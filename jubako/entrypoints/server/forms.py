"""Which form must an answer have, as the fields of its request say?"""

from __future__ import annotations

from typing import Any

import msgspec

from jubako.entrypoints.server.protocol import GenerationRequest
from jubako.errors import ValidationError
from jubako.sampling_params import StructuredOutputsParams

_TYPES = "text, json_object, json_schema or structural_tag"


def read_form(request: GenerationRequest) -> StructuredOutputsParams | None:
    """The form that `response_format` or `structured_outputs` asks for.

    Raises `ValidationError` for a field of the wrong shape; whether a grammar can be made of it is
    for the engine's front end to say.
    """
    form = None
    if request.response_format is not None:
        form = _of_response_format(request.response_format)
    if request.structured_outputs is None:
        return form
    if form is not None:
        raise ValidationError(
            "response_format and structured_outputs both say what the answer must look like; leave "
            "one of them out.",
            "structured_outputs",
        )
    return request.structured_outputs


def _of_response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=_schema(given.get("json_schema")))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=msgspec.json.encode(given).decode())
    raise ValidationError(
        f"response_format.type must be {_TYPES}.", "response_format.type", given.get("type")
    )


def _schema(given: Any) -> dict[str, Any]:
    where = "response_format.json_schema"
    if not isinstance(given, dict):
        raise ValidationError(f"{where} must be an object with a schema.", where)
    if not isinstance(given.get("strict"), bool | None):
        raise ValidationError(f"{where}.strict must be true or false.", f"{where}.strict")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise ValidationError(
            f"{where}.schema must be a JSON schema, an object.", f"{where}.schema"
        )
    return schema


_FIELDS = {
    "json_schema": "response_format.json_schema.schema",
    "structural_tag": "response_format",
}


def as_client_named(error: ValidationError, request: GenerationRequest) -> ValidationError:
    """`error` about a form, with the name of the field by which the client asked for it."""
    parameter = error.parameter or ""
    if request.structured_outputs is not None or not parameter.startswith("structured_outputs"):
        return error
    if request.response_format is not None:
        field = _FIELDS.get(request.response_format.get("type", ""), "response_format")
    else:
        # A tool that must be called makes the form.
        field = "tools"
    message = error.message.replace(parameter, field, 1)
    return ValidationError(message, field, code=error.code)
