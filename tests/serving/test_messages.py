"""/v1/messages: what Anthropic's client gets for what it asks."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import FakeAsyncLLM
from tests.serving.test_tools import BOTH, CALL, HERMES, prompt_of

PATH = "/v1/messages"
TOOL: Any = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    engine = FakeAsyncLLM(max_model_len=4096)
    engine.tokenizer.chat_template = HERMES
    return serve_module(engine)


@pytest.fixture
def server(shared: Served) -> Served:
    shared.engine.forget()
    return shared


def client_of(server: Served, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def ask(said: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"!say {said}!end"}]
    return {"model": "fake-model", "max_tokens": 1000, "messages": messages} | fields


def test_an_answer_has_anthropics_shape(server: Served) -> None:
    message = client_of(server).messages.create(**ask("Yes."), system="Be brief.")
    assert message.id.startswith("msg_")
    assert message.model == "fake-model"
    assert [(block.type, block.text) for block in message.content] == [("text", "Yes.")]
    assert message.stop_reason == "end_turn"
    prompt = len(server.engine.requests[-1]["ids"])
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == prompt
    assert message.usage.output_tokens == 4
    assert prompt_of(server).startswith("<system>Be brief.<user>")


def test_a_stream_builds_the_same_message(server: Served) -> None:
    arguments = ask(BOTH, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    client = client_of(server)
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        kinds = [event.type for event in stream]
        built = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"

    def told(message: Message) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert told(built) == told(whole)
    assert told(whole)[2]["input"] == {"city": "Oslo"}
    assert built.stop_reason == whole.stop_reason
    assert built.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


@pytest.mark.parametrize(
    ("fields", "reason"), [({"max_tokens": 2}, "max_tokens"), ({}, "end_turn")]
)
def test_why_it_ended(server: Served, fields: dict[str, Any], reason: str) -> None:
    message = client_of(server).messages.create(**ask("Yes.", **fields))
    assert message.stop_reason == reason


def test_calls_and_results_go_back_to_the_model(server: Served) -> None:
    messages: Any = [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "cold"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    client_of(server).messages.create(
        model="fake-model", max_tokens=9, messages=messages, tools=[TOOL]
    )
    assert "<assistant>I look.<tool>cold<user>And?[tools=" in prompt_of(server)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "any"}, '[{"name": "get_weather", "parameters": {}}]'),
        ({"type": "tool", "name": "get_weather"}, "{}"),
    ],
)
def test_a_call_can_be_demanded(server: Served, choice: Any, said: str) -> None:
    message = client_of(server).messages.create(**ask(said), tools=[TOOL], tool_choice=choice)
    (block,) = message.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("get_weather", {})
    assert message.stop_reason == "tool_use"


def test_tokens_are_counted_without_an_answer(server: Served) -> None:
    body: Any = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
    client = client_of(server)
    count = client.messages.count_tokens(**body).input_tokens
    assert not server.engine.requests
    client.messages.create(**body, max_tokens=1)
    assert count == len(server.engine.requests[-1]["ids"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"tools": [{"name": "a b"}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    answer = server.post(PATH, ask("x") | fields)
    assert answer.status_code == 400
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param


def test_images_are_refused(server: Served) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="takes text only"):
        client_of(server).messages.create(
            **ask("x") | {"messages": [{"role": "user", "content": [block]}]}
        )


def test_an_unknown_model_is_not_found(server: Served) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client_of(server).messages.create(**ask("x") | {"model": "other"})


def test_an_error_in_a_stream_is_an_event(server: Served) -> None:
    body = ask("x", stream=True) | {"messages": [{"role": "user", "content": "!error"}]}
    text = server.post(PATH, body).text
    assert text.rstrip().rpartition("\n\n")[2].startswith("event: error\ndata: ")
    assert '"type":"error"' in text
    assert "[DONE]" not in text


def test_the_clients_own_header_carries_the_key(serve: Serve) -> None:
    server = serve(FakeAsyncLLM(max_model_len=256), api_key="secret")
    assert client_of(server, "secret").messages.create(**ask("Yes.", max_tokens=9)).content
    with pytest.raises(anthropic.AuthenticationError):
        client_of(server, "wrong").messages.create(**ask("Yes.", max_tokens=9))


def test_without_tools_a_call_is_text(server: Served) -> None:
    (block,) = client_of(server).messages.create(**ask(CALL)).content
    assert block.type == "text"
    assert block.text == CALL
