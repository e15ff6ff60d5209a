"""/v1/responses: what OpenAI's client gets for what it asks."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from jubako.entrypoints.server.errors import ServerError
from jubako.entrypoints.server.response_store import ResponseStore, StoredResponse
from jubako.entrypoints.server.responses_protocol import ResponseObject
from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import FakeAsyncLLM
from tests.serving.test_bad_input import check_error
from tests.serving.test_tools import BOTH, HERMES, prompt_of

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    engine = FakeAsyncLLM(max_model_len=4096)
    engine.tokenizer.chat_template = HERMES
    return serve_module(engine)


@pytest.fixture
def server(shared: Served) -> Served:
    shared.engine.forget()
    return shared


def ask(server: Served, said: str, **fields: Any) -> Any:
    client = server.openai()
    return client.responses.create(model="fake-model", input=f"!say {said}!end", **fields)


def told(response: Response) -> list[Any]:
    """What a response holds, without ids."""
    items: list[Any] = []
    for item in response.output:
        if item.type == "message":
            items.append(("message", "".join(part.text for part in item.content)))
        elif item.type == "reasoning":
            items.append(("reasoning", "".join(part.text for part in item.content or [])))
        else:
            items.append((item.type, item.name, item.arguments))
    return items


def test_an_answer_has_openais_shape(server: Served) -> None:
    body = {"input": "!say Yes.!end", "instructions": "Be brief.", "metadata": {"a": "b"}}
    answer = Response.model_validate(server.post(PATH, body).json())
    assert answer.id.startswith("resp_")
    assert answer.output_text == "Yes."
    assert answer.status == "completed"
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(server.engine.requests[-1]["ids"])
    assert answer.usage.output_tokens == 4
    assert prompt_of(server).startswith("<system>Be brief.<user>")


def test_a_stream_tells_of_every_item_and_ends_with_the_response(server: Served) -> None:
    whole = ask(server, BOTH, tools=[TOOL])
    events = list(ask(server, BOTH, tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[0].response.output == []
    assert events[-1].type == "response.completed"
    assert told(events[-1].response) == told(whole)
    assert [kind for kind, *_ in told(whole)] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert json.loads(told(whole)[2][2]) == {"city": "Oslo"}
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == "I will look."
    added = [e for e in events if e.type == "response.output_item.added"]
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [e.item.id for e in added] == [e.item.id for e in done]
    assert [e.output_index for e in added] == [0, 1, 2, 3]
    arguments = "".join(
        e.delta
        for e in events
        if e.type == "response.function_call_arguments.delta" and e.output_index == 2
    )
    assert arguments == told(whole)[2][2]


def test_the_clients_own_accumulation_agrees(server: Served) -> None:
    client = server.openai()
    with client.responses.stream(model="fake-model", input="!say Yes.!end") as stream:
        final = stream.get_final_response()
    assert final.output_text == "Yes."


def test_too_few_tokens_leave_it_incomplete(server: Served) -> None:
    answer = ask(server, "Yes, it is.", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_a_conversation_goes_on_from_a_stored_response(server: Served) -> None:
    first = ask(server, "Yes.", instructions="Be brief.")
    ask(server, "No.", previous_response_id=first.id)
    told = "<user>!say Yes.!end<assistant>Yes.<user>!say No.!end<assistant>"
    assert prompt_of(server) == told
    assert server.openai().responses.retrieve(first.id).output_text == "Yes."


def test_calls_and_their_outputs_go_back_to_the_model(server: Served) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "H"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
    ]
    server.openai().responses.create(model="fake-model", input=items, tools=[TOOL])
    assert "<user>How is it?<assistant><tool>cold[tools=" in prompt_of(server)


def test_what_is_not_stored_or_was_deleted_cannot_be_found(server: Served) -> None:
    client = server.openai()
    kept, lost = ask(server, "a"), ask(server, "b", store=False)
    client.responses.delete(kept.id)
    for id in (kept.id, lost.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
        with pytest.raises(openai.NotFoundError):
            ask(server, "c", previous_response_id=id)


def test_a_background_response_is_filled_behind_its_answer(serve: Serve) -> None:
    server = serve(FakeAsyncLLM(max_model_len=256))
    server.engine.hold()
    client = server.openai()
    begun = ask(server, "Yes.", background=True)
    assert begun.status == "queued"
    server.engine.wait_for(lambda: bool(server.engine.running))
    assert client.responses.retrieve(begun.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="wait until"):
        ask(server, "No.", previous_response_id=begun.id)
    server.engine.release()
    server.engine.wait_for(lambda: not server.engine.running)
    for _ in range(10_000):
        done = client.responses.retrieve(begun.id)
        if done.status != "in_progress":
            break
    assert done.status == "completed"
    assert done.output_text == "Yes."


def test_a_background_response_can_be_cancelled(serve: Serve) -> None:
    server = serve(FakeAsyncLLM(max_model_len=256), max_queued_requests=1)
    server.engine.hold()
    begun = ask(server, "Yes.", background=True)
    server.engine.wait_for(lambda: bool(server.engine.running))
    with pytest.raises(openai.RateLimitError):
        ask(server, "No.")
    client = server.openai()
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert not server.engine.running
    server.engine.release()
    assert ask(server, "No.").output_text == "No."


def test_a_failed_background_response_says_nothing_of_the_inside(serve: Serve) -> None:
    server = serve(FakeAsyncLLM(max_model_len=256))
    client = server.openai()
    begun = client.responses.create(model="fake-model", input="!boom", background=True)
    for _ in range(10_000):
        done = client.responses.retrieve(begun.id)
        if done.status not in ("queued", "in_progress"):
            break
    assert done.status == "failed"
    assert done.error is not None
    assert "secret" not in done.error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"background": True, "store": False}, "store"),
        ({"background": True, "stream": True}, "stream"),
        ({"reasoning": {"effort": "utmost"}}, "reasoning_effort"),
        ({"text": {"format": 1}}, "text.format"),
        ({"max_output_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    check_error(server.post(PATH, {"input": "hi"} | fields), 400, "invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"conversation": "c"}, "conversation"),
    ],
)
def test_what_is_not_built_is_refused(server: Served, fields: dict[str, Any], param: str) -> None:
    check_error(server.post(PATH, {"input": "hi"} | fields), 400, "unsupported_parameter", param)


def test_an_error_in_a_stream_is_an_event(server: Served) -> None:
    text = server.post(PATH, {"input": "!error", "stream": True}).text
    assert text.rstrip().rpartition("\n\n")[2].startswith('event: error\ndata: {"type":"error"')


def stored(id: str, characters: int) -> StoredResponse:
    response = ResponseObject(
        id=id, created_at=0, status="completed", background=False, instructions=None,
        max_output_tokens=None, metadata={}, model="m", output=[], parallel_tool_calls=True,
        previous_response_id=None, reasoning={}, store=True, temperature=None, text={},
        tool_choice="auto", tools=[], top_p=None, truncation="disabled",
    )  # fmt: skip
    return StoredResponse(response, [{"content": "x" * characters}])


def test_the_oldest_responses_are_forgotten() -> None:
    store = ResponseStore(max_responses=3, max_characters=1000)
    for i in range(4):
        store.put(stored(f"r{i}", 10))
    assert len(store) == 3
    with pytest.raises(ServerError):
        store.get("r0")
    store.put(stored("long", 970))
    assert len(store) == 1
    assert store.get("long").response.id == "long"
