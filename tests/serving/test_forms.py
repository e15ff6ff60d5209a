"""The form of an answer over HTTP: which fields ask for it, and how bad ones are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.conftest import Serve, Served
from tests.serving.test_bad_input import CHAT, COMPLETIONS, MESSAGE, check_error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module()


def ask(server: Served, path: str, **fields: Any) -> Any:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    return server.post(path, prompt | fields)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json",
            SCHEMA,
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        (
            {"structured_outputs": {"grammar": "start: A"}, "response_format": {"type": "text"}},
            "grammar",
            "start: A",
        ),
    ],
)
def test_forms_reach_the_engine(
    server: Served, path: str, fields: dict[str, Any], kind: str, value: Any
) -> None:
    assert ask(server, path, **fields).status_code == 200
    form = server.engine.params[-1].structured_outputs
    assert form is not None
    assert getattr(form, kind) == value


def test_a_structural_tag_reaches_the_engine(server: Served) -> None:
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f"],
    }
    assert ask(server, CHAT, response_format=tag).status_code == 200
    form = server.engine.params[-1].structured_outputs
    assert form is not None
    assert json.loads(form.structural_tag or "") == tag


def test_text_asks_for_nothing(server: Served) -> None:
    assert ask(server, CHAT, response_format={"type": "text"}).status_code == 200
    assert server.engine.params[-1].structured_outputs is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
]


@pytest.mark.parametrize(("fields", "parameter"), BAD)
def test_fields_of_the_wrong_shape(server: Served, fields: dict[str, Any], parameter: str) -> None:
    check_error(ask(server, CHAT, **fields), 400, "invalid_value", parameter)


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
def test_older_names_say_what_to_use(server: Served, name: str) -> None:
    response = ask(server, COMPLETIONS, **{f"guided_{name}": "a"})
    error = check_error(response, 400, "unsupported_parameter", f"guided_{name}")
    assert f"structured_outputs.{name}" in error["message"]
