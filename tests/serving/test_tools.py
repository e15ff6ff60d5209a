"""Tools on /v1/chat/completions: what the model is told, and what of its answer is a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import FakeAsyncLLM, FakeTokenizer
from tests.serving.test_bad_input import check_error

HERMES = "{% if tools %}<tool_call>{% endif %}<think></think>"


def tool(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
BOTH = f"<think>\nHm.\n</think>\n\nI will look.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    engine = FakeAsyncLLM(max_model_len=4096)
    engine.tokenizer.chat_template = HERMES
    return serve_module(engine)


@pytest.fixture
def server(shared: Served) -> Served:
    shared.engine.forget()
    return shared


@pytest.fixture(scope="module")
def plain(serve_module: Serve) -> Served:
    """A model whose template knows no tools."""
    return serve_module(FakeAsyncLLM(max_model_len=4096))


def prompt_of(server: Served) -> str:
    return FakeTokenizer().decode(server.engine.requests[-1]["ids"])


def gathered(stream: Any) -> dict[str, Any]:
    """A streamed answer as one."""
    told: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    for chunk in stream:
        for choice in chunk.choices:
            told["content"] += choice.delta.content or ""
            told["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            told["reason"] = choice.finish_reason or told["reason"]
            for call in choice.delta.tool_calls or []:
                if call.index == len(told["calls"]):
                    assert call.id
                    assert call.type == "function"
                    told["calls"].append([call.function.name, ""])
                told["calls"][call.index][1] += call.function.arguments or ""
    return told


def test_thoughts_content_and_calls_come_apart(server: Served) -> None:
    response = server.chat(f"!say {BOTH}!end", tools=[tool()])
    answer = ChatCompletion.model_validate(response.json())
    message = answer.choices[0].message
    assert message.content == "I will look."
    assert response.json()["choices"][0]["message"]["reasoning_content"] == "Hm."
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["get_weather"] * 2
    assert json.loads(message.tool_calls[1].function.arguments) == {"city": "Oslo"}
    assert message.tool_calls[0].id != message.tool_calls[1].id
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("several", [True, False])
def test_a_stream_says_the_same(server: Served, several: bool) -> None:
    arguments: dict[str, Any] = {
        "model": "fake-model",
        "messages": [{"role": "user", "content": f"!say {BOTH}!end"}],
        "tools": [tool()],
        "parallel_tool_calls": several,
    }
    client = server.openai()
    whole = client.chat.completions.create(**arguments).choices[0]
    told = gathered(client.chat.completions.create(**arguments, stream=True))
    assert told["content"] == whole.message.content
    assert told["reasoning"] == "Hm."
    assert told["reason"] == whole.finish_reason == "tool_calls"
    calls = whole.message.tool_calls or []
    assert told["calls"] == [[c.function.name, c.function.arguments] for c in calls]
    assert len(calls) == (2 if several else 1)


def test_only_a_call_has_no_content(server: Served) -> None:
    message = server.chat(f"!say {CALL}!end", tools=[tool()]).json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message


@pytest.mark.parametrize("fields", [{}, {"tools": [tool()], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(server: Served, fields: dict[str, Any]) -> None:
    choice = server.chat(f"!say {CALL}!end", **fields).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert "tools" not in prompt_of(server)


def test_thoughts_can_be_left_out(server: Served) -> None:
    message = server.chat(f"!say {BOTH}!end", include_reasoning=False).json()["choices"][0][
        "message"
    ]
    assert "reasoning_content" not in message
    assert message["content"].startswith("I will look.")


def test_a_cut_answer_says_length(server: Served) -> None:
    choice = server.chat(f"!say {CALL}!end", tools=[tool()], max_tokens=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'


def test_the_template_is_given_the_tools_and_earlier_calls(server: Served) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
    ]
    server.post("/v1/chat/completions", {"messages": messages, "tools": [tool()]})
    assert "<assistant><tool>cold[tools=[{'type': 'function'" in prompt_of(server)


def test_a_template_without_tools_gets_them_in_its_text(plain: Served) -> None:
    said = '!say ```json\n{"name": "get_weather", "parameters": {"city": "Oslo"}}\n```!end'
    choice = plain.chat(said, tools=[tool(description="Tells it.")]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert "<system>You have access to functions." in prompt_of(plain)
    assert '"description": "Tells it."' in prompt_of(plain)


def test_a_template_without_tools_sees_earlier_calls_as_turns(plain: Served) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": "cold"},
    ]
    plain.post("/v1/chat/completions", {"messages": messages})
    told = '<assistant>{"name": "get_weather", "parameters": {"city": "Oslo"}}'
    assert prompt_of(plain).endswith(f"{told}<user>Result of get_weather: cold<assistant>")


@pytest.mark.parametrize(
    ("choice", "said", "name", "arguments", "reason"),
    [
        (
            "required",
            '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]',
            "get_weather",
            {"city": "Oslo"},
            "tool_calls",
        ),
        (
            {"type": "function", "function": {"name": "now"}},
            '{"city": "Rome"}',
            "now",
            {"city": "Rome"},
            "stop",
        ),
    ],
)
def test_a_call_can_be_demanded(
    server: Served, choice: Any, said: str, name: str, arguments: dict[str, Any], reason: str
) -> None:
    tools = [tool(), tool("now")]
    answer = server.chat(f"!say {said}!end", tools=tools, tool_choice=choice).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        name,
        arguments,
    )
    assert answer["finish_reason"] == reason
    constraint = server.engine.params[-1].structured_outputs
    assert constraint is not None
    schema = constraint.json
    assert isinstance(schema, dict)
    if choice == "required":
        named = [s["properties"]["name"]["const"] for s in schema["items"]["anyOf"]]
        assert named == ["get_weather", "now"]
    else:
        assert schema == tool()["function"]["parameters"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters=[1])]}, "tools[0].function.parameters"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    check_error(server.chat("hi", **fields), 400, "invalid_value", param)


def test_tokenize_counts_the_tools(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    without = server.post("/tokenize", body).json()["count"]
    with_tools = server.post("/tokenize", body | {"tools": [tool()]}).json()["count"]
    assert with_tools > without + 50
