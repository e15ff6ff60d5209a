"""/v1/chat/completions: what an OpenAI client gets for what it asks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.conftest import Serve, Served, events_of
from tests.serving.fake_engine import BOS, FakeAsyncLLM, FakeTokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    return serve_module(FakeAsyncLLM(max_model_len=256))


@pytest.fixture
def server(shared: Served) -> Served:
    shared.engine.forget()
    return shared


def prompt_of(server: Served) -> str:
    ids: list[int] = server.engine.requests[-1]["ids"]
    return FakeTokenizer().decode(ids, skip_special_tokens=False)


def test_an_answer_has_openais_shape(server: Served) -> None:
    answer = ChatCompletion.model_validate(server.chat("hi").json())
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "<user>hi<assistant>"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 19
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 9


def test_the_openai_client_streams_what_it_gets_at_once(server: Served) -> None:
    client = server.openai()
    arguments: dict[str, Any] = {"model": "fake-model", "messages": HI, "max_tokens": 7}
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    first, *parts, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content for c in parts) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in parts] == [None] * 6 + ["length"]
    assert last.choices == []
    assert last.usage == whole.usage


def test_every_chunk_has_openais_shape_and_done_comes_last(server: Served) -> None:
    response = server.chat("hi", stream=True, logprobs=True, top_logprobs=2)
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        ChatCompletionChunk.model_validate(json.loads(event))


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(server: Served, stream: bool) -> None:
    response = server.chat("hi", n=3, max_tokens=4, stream=stream)
    if stream:
        texts = {0: "", 1: "", 2: ""}
        roles = []
        for event in events_of(response.text)[:-1]:
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
                if "role" in choice["delta"]:
                    roles.append(choice["index"])
        assert roles == [0, 1, 2]
    else:
        texts = {c["index"]: c["message"]["content"] for c in response.json()["choices"]}
    assert texts == dict.fromkeys(range(3), "<use")


def test_logprobs_list_exactly_the_best(server: Served) -> None:
    answer = server.chat("hi", logprobs=True, top_logprobs=1, max_tokens=1).json()
    ChatCompletion.model_validate(answer)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("<", -1.0, [60])
    # The chosen token is second best: it is not among the one best.
    assert [t["token"] for t in token["top_logprobs"]] == ["="]


def test_logprobs_without_a_number_show_the_chosen_token_only(server: Served) -> None:
    answer = server.chat("hi", logprobs=True, max_tokens=1).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_bytes_of_a_character_are_its_utf8(server: Served) -> None:
    answer = server.chat("日", logprobs=True).json()
    entry = next(t for t in answer["choices"][0]["logprobs"]["content"] if t["token"] == "日")
    assert entry["bytes"] == list("日".encode())


def test_an_unset_length_is_the_rest_of_the_context(server: Served) -> None:
    server.chat("hi")
    assert server.engine.params[0].max_tokens == 256 - 19


def test_the_newer_name_of_max_tokens_wins(server: Served) -> None:
    server.chat("hi", max_tokens=3, max_completion_tokens=5)
    assert server.engine.params[0].max_tokens == 5


def test_the_models_own_limit_holds_when_none_is_given(serve: Serve) -> None:
    engine = FakeAsyncLLM(max_model_len=256)
    engine.config = engine.config.replace(
        model_config={"generation_config": {"max_new_tokens": 20}}
    )
    server = serve(engine)
    server.chat("hi")
    server.chat("hi", max_tokens=30)
    assert [p.max_tokens for p in engine.params] == [20, 30]


# -- messages ---------------------------------------------------------------------------------


def test_text_parts_are_joined(server: Served) -> None:
    server.chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert prompt_of(server) == "<user>a\nb<assistant>"


def test_developer_is_system(server: Served) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *HI]
    server.post("/v1/chat/completions", {"messages": messages})
    assert prompt_of(server) == "<system>be brief<user>hi<assistant>"


def test_the_template_writes_the_start_token(server: Served) -> None:
    server.chat("hi")
    server.chat("hi", add_special_tokens=True)
    assert [r["ids"][0] == BOS for r in server.engine.requests] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_continuing_the_last_message_with_echo(server: Served, stream: bool) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 2}
    response = server.post("/v1/chat/completions", body | {"stream": stream})
    assert prompt_of(server) == "<user>hi<assistant>Well, "
    if stream:
        chunks = [json.loads(e) for e in events_of(response.text)[:-1]]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "Well, <u"


def test_template_arguments_reach_the_template(server: Served) -> None:
    server.chat("hi", chat_template_kwargs={"mood": "fine"}, documents=[])
    assert prompt_of(server) == "<user>hi[mood=fine][documents=[]]<assistant>"


def test_token_ids_in_the_answer(server: Served) -> None:
    answer = server.chat("hi", return_token_ids=True, max_tokens=2).json()
    assert answer["prompt_token_ids"] == server.engine.requests[0]["ids"]
    assert answer["choices"][0]["token_ids"] == answer["prompt_token_ids"][:2]
    response = server.chat("hi", return_token_ids=True, max_tokens=2, stream=True)
    first, *rest = (json.loads(e) for e in events_of(response.text)[:-1])
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for c in rest for i in c["choices"][0]["token_ids"]] == first["prompt_token_ids"][:2]


def test_neutral_values_of_what_is_not_built_are_fine(server: Served) -> None:
    response = server.chat(
        "hi",
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        service_tier="auto",
        reasoning_effort=None,
    )
    assert response.status_code == 200
    assert "x-jubako-warning" not in response.headers


def test_a_model_without_a_template_says_so(serve: Serve) -> None:
    engine = FakeAsyncLLM()
    engine.tokenizer.chat_template = None
    error = serve(engine).chat("hi").json()["error"]
    assert error["param"] == "messages"
    assert "chat template" in error["message"]


def test_a_template_that_refuses_is_the_clients_error(server: Served) -> None:
    response = server.chat("!template")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
