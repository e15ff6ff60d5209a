"""/v1/completions of a model whose encoder reads the prompt."""

from __future__ import annotations

import pytest

from jubako.config import JubakoConfig
from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import FakeAsyncLLM, FakeTokenizer

CONTEXT = 24
READS = 40


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    encoder = {
        "modality": "text",
        "max_input_tokens": READS,
        "decoder_start_token_id": 2,
        "default_decoder_prompt": (2, 0),
    }
    config = JubakoConfig().replace(encoder_config=encoder)
    return serve_module(FakeAsyncLLM(CONTEXT, config=config))


def test_the_text_that_was_sent_counts_and_nothing_else(server: Served) -> None:
    text = "x" * (CONTEXT + 5)
    usage = server.complete(text, max_tokens=3).json()["usage"]
    assert usage["prompt_tokens"] == len(FakeTokenizer().encode(text))
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3


def test_the_answer_has_the_decoders_room_however_long_the_text_is(server: Served) -> None:
    for length in (1, READS - 1):
        server.engine.forget()
        room = CONTEXT - 2
        assert server.complete("x" * length, max_tokens=room).status_code == 200
        assert server.engine.params[-1].max_tokens == room
        refused = server.complete("x" * length, max_tokens=room + 1)
        assert refused.status_code == 400
        assert f"ask for at most {room}" in refused.json()["error"]["message"]


def test_a_text_that_the_encoder_cannot_read(server: Served) -> None:
    refused = server.complete("x" * READS)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"encoder reads {READS}" in refused.json()["error"]["message"]
    cut = server.complete("x" * 3 * READS, truncate_prompt_tokens=-1, max_tokens=1).json()
    assert cut["usage"]["prompt_tokens"] == READS


def test_an_answer_does_not_continue_the_prompt(server: Served) -> None:
    refused = server.complete("hello", echo=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "echo"
