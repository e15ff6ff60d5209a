"""Vectors and scores over HTTP: OpenAI's client and plain requests against real tiny models."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jubako import LLM, AsyncLLM, PoolingParams
from tests.exactness.test_pooling import make
from tests.serving.conftest import Serve, Served
from tests.serving.test_bad_input import check_error

ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


def start(serve: Serve, folder: Path, **options: Any) -> Served:
    engine = AsyncLLM(str(folder), **ENGINE, **options)
    return serve(start=lambda: engine)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pooling") / "tiny-bert"
    return make("bert", "Model", folder, is_matryoshka=True)[0]


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pooling") / "tiny-judge"
    return make("bert", "ForSequenceClassification", folder, num_labels=1)[0]


@pytest.fixture(scope="module")
def embedder(serve_module: Serve, bert: Path) -> Served:
    return start(serve_module, bert)


@pytest.fixture(scope="module")
def judge(serve_module: Serve, cross_encoder: Path) -> Served:
    return start(serve_module, cross_encoder)


@pytest.fixture(scope="module")
def llm(bert: Path) -> Iterator[LLM]:
    with LLM(str(bert), **ENGINE) as llm:
        yield llm


def close(got: Any, want: Any) -> bool:
    return bool(np.abs(np.array(got) - np.array(want)).max() < 1e-5)


# -- embeddings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["w5 w6", ["w5 w6", "w7"], [3, 5, 6, 4], [[3, 5, 6, 4], [3, 7, 4]]], ids=str
)
def test_openais_client_gets_the_vectors_of_llm(embedder: Served, llm: LLM, given: Any) -> None:
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    want = llm.embed(prompts)
    answer = embedder.openai().embeddings.create(model="tiny-bert", input=given)
    assert answer.object == "list"
    assert answer.model == "tiny-bert"
    assert [item.index for item in answer.data] == list(range(len(prompts)))
    for item, output in zip(answer.data, want, strict=True):
        assert item.object == "embedding"
        assert close(item.embedding, output.outputs.embedding)
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in want)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens


def test_both_encodings_have_openais_fields_and_the_same_numbers(embedder: Served) -> None:
    plain, packed = (
        embedder.post("/v1/embeddings", {"input": "w5", "encoding_format": name}).json()
        for name in ("float", "base64")
    )
    for answer in (plain, packed):
        assert set(answer) == {"object", "data", "model", "usage"}
        assert set(answer["data"][0]) == {"object", "index", "embedding"}
        assert set(answer["usage"]) == {"prompt_tokens", "total_tokens"}
    numbers = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert close(plain["data"][0]["embedding"], numbers)


def test_dimensions_cut_the_vector(embedder: Served, llm: LLM) -> None:
    answer = embedder.openai().embeddings.create(model="tiny-bert", input="w5", dimensions=8)
    (want,) = llm.embed("w5", PoolingParams(dimensions=8))
    assert len(answer.data[0].embedding) == 8
    assert close(answer.data[0].embedding, want.outputs.embedding)


def test_truncation_keeps_the_frame(embedder: Served) -> None:
    long, fields = "w5 " * 200, {"truncate_prompt_tokens": 7}
    answer = embedder.post("/v1/embeddings", {"input": long, **fields}).json()
    assert answer["usage"]["prompt_tokens"] == 7
    cut = embedder.post("/v1/embeddings", {"input": [[3, 5, 5, 5, 5, 5, 4]]}).json()
    assert answer["data"] == cut["data"]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_value", "input"),
        ({"input": []}, 400, "invalid_value", "input"),
        ({"input": ""}, 400, "invalid_value", "input"),
        ({"input": ["w5", ""]}, 400, "invalid_value", "input"),
        ({"input": 5}, 400, "invalid_value", "input"),
        ({"input": ["w5", 6]}, 400, "invalid_value", "input"),
        ({"input": [5, 1000]}, 400, "invalid_value", "input"),
        ({"input": "w5 " * 129}, 400, "context_length_exceeded", "input"),
        ({"input": "w5", "dimensions": 49}, 400, "invalid_value", "dimensions"),
        ({"input": "w5", "dimensions": 0}, 400, "invalid_value", "dimensions"),
        ({"input": "w5", "dimensions": "8"}, 400, "invalid_value", "dimensions"),
        ({"input": "w5", "encoding_format": "hex"}, 400, "invalid_value", "encoding_format"),
        (
            {"input": "w5", "truncate_prompt_tokens": 500},
            400,
            "invalid_value",
            "truncate_prompt_tokens",
        ),
        ({"input": "w5", "model": "other"}, 404, "model_not_found", "model"),
        ({"messages": [{"role": "user"}]}, 400, "unsupported_parameter", "messages"),
    ],
    ids=str,
)
def test_bad_requests_get_the_one_shape(
    embedder: Served, body: Any, status: int, code: str, param: str
) -> None:
    check_error(embedder.post("/v1/embeddings", body), status, code, param)


def test_one_bad_input_leaves_the_server_idle_and_well(embedder: Served) -> None:
    assert embedder.post("/v1/embeddings", {"input": [[5], [1000]]}).status_code == 400
    answer = embedder.post("/v1/embeddings", {"input": [[5]] * 40})
    assert len(answer.json()["data"]) == 40
    assert len({tuple(item["embedding"]) for item in answer.json()["data"]}) <= 2


# -- scores -----------------------------------------------------------------------------------


def test_embeddings_score_by_their_angle(embedder: Served, llm: LLM) -> None:
    documents = ["w7 w8", "w5 w6", "w9"]
    want = [output.outputs.score for output in llm.score("w5 w6", documents)]
    body = {"queries": "w5 w6", "documents": documents}
    answers = [embedder.post(path, body).json() for path in ("/score", "/v1/score")]
    for answer in answers:
        assert close([item["score"] for item in answer["data"]], want)
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        # The query is a document too, and read once.
        assert answer["usage"]["prompt_tokens"] == 4 + 4 + 3
    assert abs(want[1] - 1) < 1e-6


def test_a_cross_encoder_reads_pairs(judge: Served, cross_encoder: Path) -> None:
    documents = ["w7 w8", "w5 w6"]
    with LLM(str(cross_encoder), **ENGINE) as llm:
        want = [output.outputs.score for output in llm.score("w5 w6", documents)]
    answer = judge.post("/score", {"text_1": "w5 w6", "text_2": documents}).json()
    assert close([item["score"] for item in answer["data"]], want)
    assert answer["usage"]["prompt_tokens"] == 2 * 7
    pairs = {"queries": ["w5 w6", "w5 w6"], "documents": documents}
    assert judge.post("/score", pairs).json()["data"] == answer["data"]
    order = sorted(range(2), key=lambda i: -want[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"query": "w5 w6", "documents": [documents[0], {"text": documents[1]}]}
        results = judge.post(path, body).json()["results"]
        assert [result["index"] for result in results] == order
        assert [result["document"]["text"] for result in results] == [documents[i] for i in order]
        assert close([result["relevance_score"] for result in results], [want[i] for i in order])
        best = judge.post(path, {**body, "top_n": 1, "return_documents": False}).json()["results"]
        assert best == [{k: v for k, v in results[0].items() if k != "document"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"documents": "w5"}, "queries"),
        ("/score", {"queries": "w5"}, "documents"),
        ("/score", {"queries": ["w5", "w6"], "documents": ["w5"] * 3}, "queries"),
        ("/score", {"queries": [], "documents": ["w5"]}, "queries"),
        ("/score", {"queries": "w5", "text_1": "w5", "documents": "w6"}, "text_1"),
        ("/rerank", {"documents": ["w5"]}, "query"),
        ("/rerank", {"query": "w5"}, "documents"),
        ("/rerank", {"query": "w5", "documents": []}, "documents"),
        ("/rerank", {"query": "w5", "documents": [{"title": "w5"}]}, "documents"),
        ("/rerank", {"query": "w5", "documents": ["w5"], "top_n": 0}, "top_n"),
    ],
    ids=str,
)
def test_bad_pairs_are_named(judge: Served, path: str, body: Any, param: str) -> None:
    check_error(judge.post(path, body), 400, "invalid_value", param)


# -- classes, and all else ----------------------------------------------------------------------


def test_classify_names_the_best_label(judge: Served) -> None:
    answer = judge.post("/classify", {"input": ["w5 w6", "w7"]}).json()
    assert [item["index"] for item in answer["data"]] == [0, 1]
    for item in answer["data"]:
        assert item["label"] == "LABEL_0"
        assert item["num_classes"] == len(item["probs"]) == 1
        assert 0 < item["probs"][0] < 1
    raw = judge.post("/classify", {"input": "w5 w6", "use_activation": False}).json()
    logit = raw["data"][0]["probs"][0]
    assert close(1 / (1 + np.exp(-logit)), answer["data"][0]["probs"][0])


def test_pooling_answers_any_task(embedder: Served, llm: LLM) -> None:
    (want,) = llm.encode("w5 w6", pooling_task="token_embed")
    answer = embedder.post("/pooling", {"input": "w5 w6"}).json()
    assert close(answer["data"][0]["data"], want.outputs.data)
    packed = embedder.post("/pooling", {"input": "w5 w6", "encoding_format": "base64"}).json()
    numbers = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4")
    assert close(numbers.reshape(4, -1), want.outputs.data)
    (vector,) = llm.embed("w5 w6")
    answer = embedder.post("/pooling", {"input": "w5 w6", "task": "embed"}).json()
    assert close(answer["data"][0]["data"], vector.outputs.embedding)
    wrong = embedder.post("/pooling", {"input": "w5", "task": "classify"})
    check_error(wrong, 400, "unsupported_task", "task")


def test_a_model_answers_only_what_it_can(embedder: Served, judge: Served, serve: Serve) -> None:
    messages = [{"role": "user", "content": "w5"}]
    for served in (embedder, judge):
        for path, body in (
            ("/v1/completions", {"prompt": "w5"}),
            ("/v1/chat/completions", {"messages": messages}),
        ):
            check_error(served.post(path, body), 400, "unsupported_task", "model")
    check_error(embedder.post("/classify", {"input": "w5"}), 400, "unsupported_task", "model")
    check_error(judge.post("/v1/embeddings", {"input": "w5"}), 400, "unsupported_task", "model")
    writer = serve()
    for path, body in (
        ("/v1/embeddings", {"input": "w5"}),
        ("/pooling", {"input": "w5"}),
        ("/classify", {"input": "w5"}),
        ("/score", {"queries": "w5", "documents": "w5"}),
        ("/rerank", {"query": "w5", "documents": ["w5"]}),
    ):
        check_error(writer.post(path, body), 400, "unsupported_task", "model")


def test_the_interface_is_described(embedder: Served) -> None:
    with embedder.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/embeddings", "/score", "/v1/score", "/v2/rerank", "/classify", "/pooling"):
        operation = paths[path]["post"]
        assert "application/json" in operation["requestBody"]["content"]
        assert "application/json" in operation["responses"]["200"]["content"]
