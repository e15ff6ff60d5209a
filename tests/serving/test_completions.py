"""/v1/completions: what an OpenAI client gets for what it asks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion

from jubako.sampling_params import RequestOutputKind
from tests.serving.conftest import Serve, Served, events_of
from tests.serving.fake_engine import BOS, FIRST_CHARACTER, FakeAsyncLLM, FakeTokenizer


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    return serve_module()


@pytest.fixture
def server(shared: Served) -> Served:
    shared.engine.forget()
    return shared


def ids(text: str) -> list[int]:
    return FakeTokenizer().encode(text)


def test_an_answer_has_openais_shape(server: Served) -> None:
    body = server.complete("hello").json()
    answer = Completion.model_validate(body)
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake-model"
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert body["choices"][0]["logprobs"] is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == 11
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_the_openai_client_streams_what_it_gets_at_once(server: Served) -> None:
    client = server.openai()
    whole = client.completions.create(model="fake-model", prompt="hello", max_tokens=4)
    stream = client.completions.create(
        model="fake-model",
        prompt="hello",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *parts, last = chunks
    assert "".join(c.choices[0].text for c in parts) == whole.choices[0].text == "hell"
    assert [c.choices[0].finish_reason for c in parts] == [None, None, None, "length"]
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(c.usage is None for c in parts)
    assert len({c.id for c in chunks}) == 1


def test_every_chunk_has_openais_shape_and_done_comes_last(server: Served) -> None:
    response = server.complete("abc", stream=True, logprobs=1)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        chunk = json.loads(event)
        assert "usage" not in chunk
        assert chunk["choices"][0]["finish_reason"] in (None, "stop")
        # The type for whole answers is the one that the client uses for chunks; it only misses
        # that the finish reason is absent before the end.
        chunk["choices"][0]["finish_reason"] = "stop"
        Completion.model_validate(chunk)


def test_usage_on_every_chunk(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = server.complete("abc", stream=True, stream_options=options)
    chunks = [json.loads(e) for e in events_of(response.text)[:-1]]
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]


def test_no_usage_when_it_is_refused(server: Served) -> None:
    response = server.complete("abc", stream=True, stream_options={"include_usage": False})
    assert all("usage" not in json.loads(e) for e in events_of(response.text)[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_answers_each(server: Served, stream: bool) -> None:
    response = server.complete(["ab", "xyz"], n=2, stream=stream)
    texts = {0: "", 1: "", 2: "", 3: ""}
    if stream:
        for event in events_of(response.text)[:-1]:
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        choices = response.json()["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        texts = {c["index"]: c["text"] for c in choices}
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == 3 + 4
        assert usage["completion_tokens"] == 2 * 2 + 2 * 3
    assert texts == {0: "ab", 1: "ab", 2: "xyz", 3: "xyz"}


def test_sub_prompts_have_ids_of_their_own(server: Served) -> None:
    server.complete(["a", "b"], request_id="mine")
    assert {r["id"] for r in server.engine.requests} == {"cmpl-mine-0", "cmpl-mine-1"}


def test_token_ids_are_taken_as_they_are(server: Served) -> None:
    answer = server.complete([FIRST_CHARACTER + ord("q")]).json()
    assert answer["choices"][0]["text"] == "q"
    assert server.engine.requests[0]["ids"] == [FIRST_CHARACTER + ord("q")]


def test_special_tokens_are_added_unless_refused(server: Served) -> None:
    server.complete("a")
    server.complete("a", add_special_tokens=False)
    assert [r["ids"][0] == BOS for r in server.engine.requests] == [True, False]


# -- logprobs ---------------------------------------------------------------------------------


def test_logprobs_list_the_best_and_the_chosen_token(server: Served) -> None:
    logprobs = server.complete("ab", logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["token_logprobs"] == [-1.0, -1.0]
    assert logprobs["text_offset"] == [0, 1]
    # The chosen token is second best: one beside the best one that was asked for.
    assert logprobs["top_logprobs"][0] == {"b": -0.5, "a": -1.0}


def test_an_impossible_token_has_a_number(server: Served) -> None:
    logprobs = server.complete("a", logprobs=3).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"b": -0.5, "a": -1.0, "c": -9999.0}


def test_zero_logprobs_show_the_chosen_token(server: Served) -> None:
    logprobs = server.complete("a", logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -1.0}]


def test_offsets_go_on_over_chunks(server: Served) -> None:
    response = server.complete("abc", logprobs=0, stream=True)
    chunks = [json.loads(e) for e in events_of(response.text)[:-1]]
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [1], [2]]


def test_tokens_as_ids(server: Served) -> None:
    answer = server.complete("a", logprobs=1, return_tokens_as_token_ids=True).json()
    token = FIRST_CHARACTER + ord("a")
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}"]
    assert set(logprobs["top_logprobs"][0]) == {f"token_id:{token}", f"token_id:{token + 1}"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_prepends_the_prompt_and_its_logprobs(server: Served, stream: bool) -> None:
    response = server.complete("ab", echo=True, logprobs=1, max_tokens=1, stream=stream)
    if stream:
        chunks = [json.loads(e)["choices"][0] for e in events_of(response.text)[:-1]]
        text = "".join(c["text"] for c in chunks)
        logprobs = chunks[0]["logprobs"]
    else:
        choice = response.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "aba"
    assert logprobs["tokens"] == ["<bos>", "a", "b", "a"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert logprobs["top_logprobs"][0] is None
    # The start-of-sequence token is not in the text.
    assert logprobs["text_offset"] == [0, 0, 1, 2]


def test_echo_of_token_ids_shows_their_text(server: Served) -> None:
    answer = server.complete(ids("ab"), echo=True, max_tokens=1).json()
    assert answer["choices"][0]["text"] == "aba"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_generates_nothing_that_is_seen(server: Served, stream: bool) -> None:
    options = {"stream": True, "stream_options": {}} if stream else {}
    response = server.complete("ab", echo=True, max_tokens=0, logprobs=0, **options)
    if stream:
        chunk, last = (json.loads(e) for e in events_of(response.text)[:-1])
        choice, usage = chunk["choices"][0], last["usage"]
    else:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["<bos>", "a", "b"]
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 0
    assert server.engine.params[0].max_tokens == 1


def test_prompt_logprobs(server: Served) -> None:
    answer = server.complete("ab", prompt_logprobs=2, max_tokens=1).json()
    first, second, _ = answer["choices"][0]["prompt_logprobs"]
    token = FIRST_CHARACTER + ord("a")
    assert first is None
    assert second[str(token)] == {"logprob": -1.0, "rank": 2, "decoded_token": "a"}


def test_token_ids_in_the_answer(server: Served) -> None:
    choice = server.complete("ab", return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids("ab")
    assert choice["token_ids"] == ids("ab")[1:]


# -- parameters -------------------------------------------------------------------------------


def test_every_sampling_field_reaches_the_engine(server: Served) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop": "END",
        "stop_token_ids": [8],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {"5": 200},
        "allowed_token_ids": [5, 6],
        "bad_words": ["x"],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "cache_salt": "salt",
    }
    assert server.complete("abc", **fields).status_code == 200
    params = server.engine.params[0]
    for name in fields.keys() - {"stop", "logit_bias", "cache_salt"}:
        assert getattr(params, name) == fields[name], name
    assert params.stop == ["END"]
    assert params.logit_bias == {5: 100.0}
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert server.engine.requests[0]["cache_salt"] == "salt"


def test_null_is_unset(server: Served) -> None:
    fields = ("max_tokens", "temperature", "stop", "logprobs", "n", "stream", "stream_options")
    assert server.complete("a", **dict.fromkeys(fields)).status_code == 200
    assert server.engine.params[0].max_tokens == 16
    assert server.engine.params[0].temperature == 1.0


def test_unset_fields_come_from_the_models_generation_config(serve: Serve) -> None:
    engine = FakeAsyncLLM()
    engine.config = engine.config.replace(
        model_config={"generation_config": {"temperature": 0.3, "top_k": 64, "bos_token_id": 2}}
    )
    server = serve(engine)
    server.complete("a")
    server.complete("a", temperature=0.7)
    assert [p.temperature for p in engine.params] == [0.3, 0.7]
    assert [p.top_k for p in engine.params] == [64, 64]


def test_the_default_length_gives_way_to_the_context(server: Served) -> None:
    # 60 characters and the start token leave 3 of the 64 tokens of the context.
    assert server.complete("x" * 60).json()["usage"]["completion_tokens"] == 3


def test_truncation_keeps_the_last_tokens(server: Served) -> None:
    assert server.complete("abcdef", truncate_prompt_tokens=2).json()["choices"][0]["text"] == "ef"
    long = "x" * 100 + "yz"
    assert server.complete(long, truncate_prompt_tokens=-1, max_tokens=2).status_code == 200
    assert len(server.engine.requests[1]["ids"]) == 62


def test_priority_reaches_an_engine_that_has_priorities(serve: Serve) -> None:
    server = serve(FakeAsyncLLM(policy="priority"))
    assert server.complete("a", priority=-3).status_code == 200
    assert server.engine.requests[0]["priority"] == -3


# -- ids and unknown fields -------------------------------------------------------------------


def test_a_request_id_is_taken_over_from_the_header(server: Served) -> None:
    response = server.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"


def test_a_request_id_that_is_no_id_is_replaced(server: Served) -> None:
    headers = {"X-Request-Id": "a b" + "c" * 200}
    response = server.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert response.status_code == 200
    assert " " not in response.headers["x-request-id"]


def test_an_unknown_field_is_ignored_and_said(server: Served) -> None:
    response = server.complete("a", no_such_field={"a": 1}, user="me")
    assert response.status_code == 200
    assert response.headers["x-jubako-warning"] == "unknown fields were ignored: no_such_field"


def test_names_of_unknown_fields_cannot_forge_headers(server: Served) -> None:
    response = server.complete("a", **{"x\r\nset-cookie: a=b": 1, "ok": 2})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers


def test_neutral_values_of_what_is_not_built_are_fine(server: Served) -> None:
    fields = {"suffix": None, "best_of": None, "response_format": {"type": "text"}}
    response = server.complete("a", **fields, use_beam_search=False, length_penalty=1.0)
    assert response.status_code == 200
