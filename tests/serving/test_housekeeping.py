"""The endpoints beside generation."""

from __future__ import annotations

import pytest

from jubako import __version__
from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import FakeAsyncLLM, FakeTokenizer
from tests.serving.test_bad_input import check_error


@pytest.fixture
def server(serve: Serve) -> Served:
    return serve()


def test_models(server: Served) -> None:
    (model,) = server.openai().models.list().data
    assert model.id == "fake-model"
    assert model.model_extra == {"max_model_len": 64}
    assert server.openai().models.retrieve("fake-model") == model


def test_a_served_name_replaces_the_models(serve: Serve) -> None:
    engine = FakeAsyncLLM()
    engine.config = engine.config.replace(model_config={"served_model_name": "mine/v2"})
    server = serve(engine)
    assert server.openai().models.retrieve("mine/v2").id == "mine/v2"
    assert server.complete("a", model="mine/v2").json()["model"] == "mine/v2"
    assert server.complete("a", model="fake-model").status_code == 404


def test_a_path_is_not_the_models_name_but_those_who_know_it_may_use_it(serve: Serve) -> None:
    engine = FakeAsyncLLM()
    engine.ready.model = "/srv/models/tiny.Q8_0.gguf"
    server = serve(engine)
    assert server.openai().models.list().data[0].id == "tiny.Q8_0"
    assert server.complete("a", model="tiny.Q8_0").status_code == 200
    assert server.complete("a", model="/srv/models/tiny.Q8_0.gguf").status_code == 200
    error = check_error(server.complete("a", model="x"), 404, "model_not_found", "model")
    assert "/srv" not in error["message"]


def test_version_and_description(server: Served) -> None:
    with server.client() as client:
        assert client.get("/version").json() == {"version": __version__}
        document = client.get("/openapi.json").json()
        assert client.get("/docs").status_code == 200
        assert client.head("/health").status_code == 200
    operation = document["paths"]["/v1/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert {"prompt", "max_tokens", "temperature", "stream"} <= fields.keys()
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert "422" not in operation["responses"]


def test_tokenize_and_detokenize(server: Served) -> None:
    ids = FakeTokenizer().encode("hi")
    answer = server.post("/tokenize", {"prompt": "hi", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 64,
        "tokens": ids,
        "token_strs": ["<bos>", "h", "i"],
    }
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "<bos>hi"}
    messages = [{"role": "user", "content": "hi"}]
    answer = server.post("/tokenize", {"messages": messages}).json()
    assert FakeTokenizer().decode(answer["tokens"]) == "<user>hi<assistant>"


def test_more_text_than_the_context_holds_can_be_counted(server: Served) -> None:
    assert server.post("/tokenize", {"prompt": "x" * 50_000}).json()["count"] == 50_001


def test_what_cannot_be_tokenized(server: Served) -> None:
    check_error(server.post("/tokenize", {}), 400, "invalid_value", "prompt")
    both = {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}
    check_error(server.post("/tokenize", both), 400, "invalid_value", "prompt")
    check_error(server.post("/detokenize", {}), 400, "invalid_value", "tokens")
    for tokens in ([-1], [10**9]):
        error = check_error(
            server.post("/detokenize", {"tokens": tokens}), 400, "invalid_value", "tokens"
        )
        assert str(tokens[0]) in error["message"]


def test_the_cache_is_reset_only_in_development(serve: Serve, server: Served) -> None:
    assert server.post("/reset_prefix_cache", {}).status_code == 404
    server = serve(dev_mode=True)
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    assert server.engine.cache_resets == 1


def test_a_silent_core_is_not_healthy(server: Served) -> None:
    server.engine.silent = True
    with server.client() as client:
        check_error(client.get("/health"), 503, "engine_dead")
        # It may come back; what it has accepted is not failed for it.
        assert client.get("/ready").status_code == 200


def test_requests_are_counted_by_route(server: Served) -> None:
    server.complete("a")
    server.complete("a", max_tokens=0)
    with server.client() as client:
        client.get("/v1/models/fake-model")
        client.get("/some/path/that/nobody/serves")
        text = client.get("/metrics").text
    for line in (
        'http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="400"} 1.0',
        'http_requests_total{handler="/v1/models/{model:path}",method="GET",status="200"} 1.0',
        'http_requests_total{handler="none",method="GET",status="404"} 1.0',
    ):
        assert line in text
    assert "/metrics" not in text
    assert "nobody" not in text
