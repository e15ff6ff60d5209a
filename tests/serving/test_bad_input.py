"""What a client is told about a request that cannot be answered, and that others go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.errors import ERROR_TABLE
from tests.serving.conftest import Serve, Served, events_of
from tests.serving.fake_engine import VOCAB_SIZE, FakeAsyncLLM

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Iterator[Served]:
    server = serve_module()
    yield server
    # Whatever was sent in this module, the server still answers.
    assert server.complete("hello").json()["choices"][0]["text"] == "hello"
    assert server.engine.running == set()


def check_error(
    response: httpx.Response, status: int, code: str, param: str | None = None
) -> dict[str, Any]:
    """The error in `response`, which must be the one shape and agree with the table."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], response.status_code) == (code, status), error
    assert ERROR_TABLE[code] == (status, error["type"])
    assert error["param"] == param
    assert error["message"].endswith(".")
    for secret in ("Traceback", "/work", "site-packages", ".py", "0x7f", " object at "):
        assert secret not in error["message"]
    return error


# -- fields -----------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    # The field, its name in the answer, and what must be said: the limit, or what to do.
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": "ten"}, "max_tokens", '"ten"'),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 2**70}, "max_tokens", "9223372036854775807"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "hot"}, "temperature", '"hot"'),
    ({"temperature": 10**400}, "temperature", "must be a number, got"),
    ({"stop": ["a"] * 2000}, "stop", "1024"),
    ({"bad_words": ["a"] * 2000}, "bad_words", "1024"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias", "token id"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"min_p": 2}, "min_p", "at most 1"),
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "at least 1e-06"),
    ({"n": 0}, "n", "at least 1"),
    ({"min_tokens": 20, "max_tokens": 5}, "min_tokens", "at most 5"),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": [1]}, "stop[0]", "string"),
    ({"stop_token_ids": "a"}, "stop_token_ids", "list"),
    ({"stop_token_ids": [2**64]}, "stop_token_ids[0]", "9223372036854775807"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"5": "a"}}, "logit_bias", "number"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "not empty"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens", "64"),
    ({"stream_options": {}}, "stream_options", "stream=true"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"stream": True, "prompt_logprobs": -1}, "prompt_logprobs", "stream"),
    ({"priority": 1}, "priority", "--scheduling-policy priority"),
    ({"cache_salt": ""}, "cache_salt", "empty"),
    ({"cache_salt": 5}, "cache_salt", "string"),
    ({"request_id": "a b"}, "request_id", "spaces"),
    ({"n": 5000}, "n", "at most 1024"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "said"), BAD_FIELDS, ids=[str(f)[:40] for f, _, _ in BAD_FIELDS]
)
def test_a_bad_field_is_named_with_its_value_and_limit(
    server: Served, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    response = server.post(path, prompt | fields)
    assert said in check_error(response, 400, "invalid_value", param)["message"]


MESSAGE = {"role": "user", "content": "hi"}

BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "required"),
    ("", "empty"),
    ([], "empty"),
    ([[]], "empty"),
    (["a", ""], "empty"),
    (5, "string"),
    ({"a": 1}, "string"),
    ([1, "a"], "prompt[1]"),
    (["a", 1], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([[1, 2.5]], "prompt[0][1]"),
    ([1, True], "prompt[1]"),
    ([None], "prompt[0]"),
    ([VOCAB_SIZE], str(VOCAB_SIZE)),
    ([2**70], str(2**70)),
]


@pytest.mark.parametrize(("prompt", "said"), BAD_PROMPTS, ids=[str(p)[:30] for p, _ in BAD_PROMPTS])
def test_a_bad_prompt(server: Served, prompt: Any, said: str) -> None:
    response = server.post(COMPLETIONS, {"prompt": prompt})
    assert said in check_error(response, 400, "invalid_value", "prompt")["message"]


BAD_MESSAGES: list[tuple[Any, str, str]] = [
    (None, "messages", "at least one"),
    ([], "messages", "at least one"),
    ("hi", "messages", "a list"),
    (["hi"], "messages[0]", "an object"),
    ([{"content": "hi"}], "messages[0].role", "system, developer, user, assistant or tool"),
    ([{"role": "king", "content": "hi"}], "messages[0].role", "assistant"),
    ([{"role": 5, "content": "hi"}], "messages[0].role", "assistant"),
    ([{"role": "user"}], "messages[0].content", "string"),
    ([{"role": "user", "content": 5}], "messages[0].content", "string"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]", "object"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "string"),
]


@pytest.mark.parametrize(
    ("messages", "param", "said"), BAD_MESSAGES, ids=[str(m)[:40] for m, _, _ in BAD_MESSAGES]
)
def test_bad_messages(server: Served, messages: Any, param: str, said: str) -> None:
    response = server.post(CHAT, {"messages": messages})
    assert said in check_error(response, 400, "invalid_value", param)["message"]


def test_logprobs_of_a_chat(server: Served) -> None:
    response = server.chat("hi", logprobs=True, top_logprobs=21)
    assert "20" in check_error(response, 400, "invalid_value", "top_logprobs")["message"]
    response = server.chat("hi", top_logprobs=2)
    assert "logprobs=true" in check_error(response, 400, "invalid_value", "top_logprobs")["message"]
    check_error(server.chat("hi", logprobs=3), 400, "invalid_value", "logprobs")


def test_the_newer_name_of_max_tokens_is_named(server: Served) -> None:
    response = server.chat("hi", max_completion_tokens=0)
    check_error(response, 400, "invalid_value", "max_completion_tokens")


def test_continuing_what_is_not_the_assistants(server: Served) -> None:
    response = server.chat("hi", continue_final_message=True)
    check_error(response, 400, "invalid_value", "continue_final_message")
    response = server.chat("hi", continue_final_message=True, add_generation_prompt=True)
    check_error(response, 400, "invalid_value", "continue_final_message")


def test_template_arguments_cannot_replace_the_messages(server: Served) -> None:
    response = server.chat("hi", chat_template_kwargs={"messages": []})
    check_error(response, 400, "invalid_value", "chat_template_kwargs")


# -- what is not built ------------------------------------------------------------------------

NOT_BUILT: list[tuple[str, str, Any]] = [
    (COMPLETIONS, "suffix", "end"),
    (COMPLETIONS, "best_of", 3),
    (COMPLETIONS, "use_beam_search", True),
    (COMPLETIONS, "prompt_embeds", "AAAA"),
    (COMPLETIONS, "guided_json", {}),
    (COMPLETIONS, "kv_transfer_params", {"a": 1}),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "chat_template", "{{ messages }}"),
    (CHAT, "length_penalty", 2.0),
]


@pytest.mark.parametrize(("path", "field", "value"), NOT_BUILT)
def test_what_is_not_built_is_refused(server: Served, path: str, field: str, value: Any) -> None:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    response = server.post(path, prompt | {field: value})
    error = check_error(response, 400, "unsupported_parameter", field)
    assert "not supported" in error["message"]


def test_broken_tool_calls_and_images_in_messages_are_refused(server: Served) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    response = server.post(CHAT, {"messages": [MESSAGE, call]})
    check_error(response, 400, "invalid_value", "messages[1].tool_calls[0].function")
    old = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    response = server.post(CHAT, {"messages": [MESSAGE, old]})
    check_error(response, 400, "unsupported_parameter", "messages[1].function_call")
    image = [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]
    response = server.chat(image)
    check_error(response, 400, "unsupported_parameter", "messages[0].content[0].type")


# -- context ----------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context(server: Served) -> None:
    error = check_error(server.complete("x" * 64), 400, "context_length_exceeded", "prompt")
    assert "65" in error["message"]
    assert "64" in error["message"]
    check_error(server.complete("x" * 63), 400, "context_length_exceeded", "prompt")
    check_error(server.chat("x" * 64), 400, "context_length_exceeded", "messages")
    check_error(server.complete("x" * 64, stream=True), 400, "context_length_exceeded", "prompt")


def test_a_prompt_far_longer_than_the_context_is_not_tokenised(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "encode", None)
    error = check_error(server.complete("x" * 10**6), 400, "context_length_exceeded", "prompt")
    assert "1000000 characters" in error["message"]


def test_an_answer_that_does_not_fit_beside_the_prompt(server: Served) -> None:
    response = server.complete("x" * 40, max_tokens=30)
    error = check_error(response, 400, "context_length_exceeded", "max_tokens")
    assert "at most 23" in error["message"]
    response = server.chat("x" * 20, max_completion_tokens=30)
    check_error(response, 400, "context_length_exceeded", "max_completion_tokens")


# -- the model --------------------------------------------------------------------------------


def test_an_unknown_model(server: Served) -> None:
    for response in (
        server.complete("a", model="gpt-5"),
        server.chat("a", model="gpt-5"),
        server.complete("a", model="gpt-5", stream=True),
        server.post("/tokenize", {"prompt": "a", "model": "gpt-5"}),
    ):
        error = check_error(response, 404, "model_not_found", "model")
        assert "'gpt-5'" in error["message"]
        assert "'fake-model'" in error["message"]
    with server.client() as client:
        check_error(client.get("/v1/models/gpt-5"), 404, "model_not_found", "model")


def test_the_openai_client_raises_its_own_errors(server: Served) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="gpt-5", prompt="a")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake-model", prompt="a", max_tokens=0)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "max_tokens")


# -- bodies -----------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}

BAD_BODIES: list[bytes] = [
    b"",
    b"{",
    b'{"prompt": "a",}',
    b"[1, 2]",
    b'"prompt"',
    b"null",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'\xef\xbb\xbf{"prompt": "a"}',
    b'{"prompt": "a"} trailing',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_BODIES, ids=[repr(b[:25]) for b in BAD_BODIES])
def test_a_body_that_is_no_json_object(server: Served, path: str, body: bytes) -> None:
    with server.client() as client:
        check_error(client.post(path, content=body, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize(
    "media_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", None],
)
def test_a_body_of_another_type(server: Served, media_type: str | None) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    with server.client() as client:
        response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    error = check_error(response, 415, "unsupported_media_type")
    assert "application/json" in error["message"]


def test_json_with_a_charset_is_fine(server: Served) -> None:
    headers = {"content-type": 'application/json; charset="UTF-8"'}
    with server.client() as client:
        response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


# -- paths ------------------------------------------------------------------------------------


def test_unknown_paths_and_methods_have_the_same_shape(server: Served) -> None:
    with server.client() as client:
        check_error(client.get("/nope"), 404, "not_found")
        check_error(client.post("/v1/nope", json={}), 404, "not_found")
        check_error(client.post("/reset_prefix_cache", json={}), 404, "not_found")
        response = client.get(COMPLETIONS)
        check_error(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        check_error(client.put("/v1/models"), 405, "method_not_allowed")
        check_error(client.get("/v1/completions/"), 404, "not_found")


# -- the engine -------------------------------------------------------------------------------


def test_what_the_engine_refuses_is_the_clients_error(server: Served) -> None:
    check_error(server.complete("!refuse"), 400, "invalid_value", "logit_bias")
    check_error(server.complete("!refuse", stream=True), 400, "invalid_value", "logit_bias")
    check_error(server.complete(["a", "!refuse"], stream=True), 400, "invalid_value", "logit_bias")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_says_nothing_of_the_inside(server: Served, stream: bool) -> None:
    error = check_error(server.complete("!boom", stream=stream), 500, "internal_error")
    assert "secret" not in error["message"]


def test_an_answer_that_the_engine_gave_up(server: Served) -> None:
    check_error(server.complete("!error", max_tokens=1), 500, "internal_error")
    check_error(server.chat("!error"), 500, "internal_error")


def test_one_bad_prompt_of_many_ends_the_others(server: Served) -> None:
    response = server.complete(["!hang", "!error"], max_tokens=1)
    check_error(response, 500, "internal_error")
    server.engine.wait_for(lambda: not server.engine.running)


def test_an_error_after_the_first_chunk_is_an_event(server: Served) -> None:
    events = events_of(server.complete("!error", stream=True).text)
    assert events[-1] == "[DONE]"
    assert '"code":"internal_error"' in events[-2]
    assert len(events) > 2


# -- anything ---------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    # JSON has no lone surrogates.
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner,
                      max_size=3),
    max_leaves=8,
)  # fmt: skip

FIELDS = [
    "prompt", "messages", "model", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words",
    "logprobs", "top_logprobs", "prompt_logprobs", "stream", "stream_options", "echo", "suffix",
    "cache_salt", "priority", "request_id", "truncate_prompt_tokens", "chat_template_kwargs",
    "documents", "tools", "response_format", "max_completion_tokens", "return_token_ids",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
    fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
    sound=st.booleans(),
)
def test_whatever_is_sent_is_answered_or_refused_in_the_one_shape(
    server: Served, path: str, fields: dict[str, Any], sound: bool
) -> None:
    body = {"prompt": "a", "messages": [MESSAGE]} | fields if sound else fields
    response = server.post(path, body)
    if response.status_code != 200:
        error = response.json()["error"]
        assert ERROR_TABLE[error["code"]] == (response.status_code, error["type"])
        assert response.status_code in (400, 404, 429)


def test_the_engine_was_only_given_sound_parameters(serve: Serve) -> None:
    engine = FakeAsyncLLM()
    server = serve(engine)
    server.complete("a", top_k=2**62)
    server.complete("a", max_tokens=0)
    assert len(engine.params) == 1
