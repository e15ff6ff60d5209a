"""What cannot be followed is refused with its field and a reason, and however it is made, looking
at it is bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jubako.errors import ValidationError
from jubako.sampling_params import StructuredOutputsParams
from jubako.structured_output.grammars import (
    MAX_BYTES,
    MAX_CHOICES,
    checked,
    closed,
    is_large,
)
from jubako.structured_output.regex import without_anchors


def refused(**fields: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        checked(StructuredOutputsParams(**fields))
    assert len(caught.value.message) < 600
    return caught.value


def nested(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


def exponential(size: int) -> dict[str, Any]:
    alternatives = [
        {
            "anyOf": [
                {"properties": {f"p{i}": {"type": "integer"}}, "required": [f"p{i}"]},
                {"properties": {f"q{i}": {"type": "string"}}},
            ]
        }
        for i in range(size)
    ]
    return {"allOf": alternatives}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "", "exactly one of"),
    ({"regex": "a", "choice": ["b"]}, "", "got regex and choice"),
    ({"json": "not json"}, ".json", "no JSON"),
    ({"json": "[1]"}, ".json", "must be a JSON schema"),
    ({"json": 7}, ".json", "must be a JSON schema"),
    ({"json": {"a": float("nan")}}, ".json", "no JSON"),
    ({"json": {"type": "strng"}}, ".json", "Invalid type"),
    ({"json": {"not": {"type": "string"}}}, ".json", 'not supported: ["not"]'),
    ({"json": {"if": {}, "then": {}}}, ".json", "not supported"),
    ({"json": {"type": "array", "uniqueItems": True}}, ".json", "uniqueItems"),
    ({"json": {"$ref": "#/nope"}}, ".json", "/nope"),
    ({"json": {"$ref": "https://example.com/x"}}, ".json", "example.com"),
    ({"json": {"type": "string", "format": "nonsense"}}, ".json", "nonsense"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, ".json", "Unsatisfiable"),
    ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, ".json", "use anyOf"),
    ({"json": nested(500)}, ".json", "recursion limit"),
    ({"json": exponential(16)}, ".json", "too large"),
    ({"json": "[" * 100_000}, ".json", "JSON"),
    ({"json": json.dumps({"description": "x" * MAX_BYTES})}, ".json", f"at most {MAX_BYTES}"),
    ({"json": {}, "disable_any_whitespace": 1}, ".disable_any_whitespace", "true or false"),
    ({"json": {}, "whitespace_pattern": "(a"}, ".json", "cannot be followed"),
    ({"regex": ""}, ".regex", "non-empty"),
    ({"regex": "(a"}, ".regex", "unclosed group"),
    ({"regex": "(?=a)b"}, ".regex", "look-around"),
    ({"regex": r"(a)\1"}, ".regex", "backreferences"),
    ({"regex": "x(^a)"}, ".regex", "anchor"),
    ({"regex": "(" * 5000 + ")" * 5000}, ".regex", "cannot be followed"),
    ({"choice": []}, ".choice", "non-empty list"),
    ({"choice": ["a", 1]}, ".choice", "strings"),
    ({"choice": ["a", ""]}, ".choice", "empty string"),
    ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, ".choice", f"at most {MAX_CHOICES}"),
    ({"grammar": "start: missing"}, ".grammar", "missing"),
    ({"grammar": "root ::= ("}, ".grammar", "cannot be"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, ".grammar", "deeply nested"),
    ({"json_object": False}, ".json_object", "must be true"),
    ({"structural_tag": "{}"}, ".structural_tag", "structures"),
    (
        {"structural_tag": '{"structures":[{"begin":"x","schema":{},"end":""}],"triggers":["y"]}'},
        ".structural_tag",
        "none of its triggers",
    ),
]


@pytest.mark.parametrize(("fields", "field", "reason"), BAD)
def test_what_cannot_be_followed(fields: dict[str, Any], field: str, reason: str) -> None:
    error = refused(**fields)
    assert error.parameter == "structured_outputs" + field
    assert reason in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {
            "json": {
                "$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}}},
                "$ref": "#/$defs/n",
            }
        },
        {"json": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
        {"json": nested(50)},
        {"regex": "(a+)+b"},
        {"regex": "(a{1000}){1000}"},
        {"regex": ".{1,100000}"},
        {"choice": [f"number {i}" for i in range(MAX_CHOICES)]},
        {"json": {"enum": [f"value {i}" for i in range(5000)]}},
    ],
)
def test_what_is_taken(fields: dict[str, Any]) -> None:
    assert checked(StructuredOutputsParams(**fields)) is not None


def test_only_a_struct_is_taken() -> None:
    with pytest.raises(ValidationError, match="StructuredOutputsParams, got dict"):
        checked({"regex": "a"})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("^ab$", "ab"),
        (r"\Aab\z", "ab"),
        ("^a|b$", "a|b"),
        ("^a$|^b$", "a|b"),
        (r"\^a\$", r"\^a\$"),
        ("[^a$]", "[^a$]"),
        ("[]^]", "[]^]"),
        ("(a|[)^])$", "(a|[)^])"),
    ],
)
def test_anchors_at_ends_say_nothing(given: str, kept: str) -> None:
    assert without_anchors(given) == kept


def test_closed_objects_have_no_further_properties() -> None:
    schema = {
        "properties": {"a": {"type": "object"}, "b": {"additionalProperties": {"properties": {}}}},
        "anyOf": [{"type": "object", "additionalProperties": True}],
    }
    assert closed(schema) == {
        "properties": {
            "a": {"type": "object", "additionalProperties": False},
            "b": {"additionalProperties": {"properties": {}, "additionalProperties": False}},
        },
        "anyOf": [{"type": "object", "additionalProperties": True}],
        "additionalProperties": False,
    }


def test_only_large_forms_are_worth_a_thread() -> None:
    assert not is_large(None)
    assert not is_large(StructuredOutputsParams(regex="a+"))
    assert is_large(StructuredOutputsParams(regex="a" * 10_000))
    assert is_large(StructuredOutputsParams(choice=["a"] * 1000))
