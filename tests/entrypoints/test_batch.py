"""`jubako run-batch`: a file of requests becomes a file of answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jubako.config import ServerConfig
from jubako.entrypoints.batch import MAX_LINE_BYTES, BatchCount, BatchFiles, run_batch
from jubako.errors import ConfigError
from tests.serving.fake_engine import FakeAsyncLLM


def request(custom_id: str, said: str = "hi", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": said}]}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields


class Batch:
    """A folder with the two files of a batch."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.engine = FakeAsyncLLM()

    def write(self, *lines: Any) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("\n".join(texts) + "\n")

    def run(self, resume: bool = False, overwrite: bool = False, at_once: int = 4) -> BatchCount:
        with BatchFiles(str(self.source), str(self.target), resume, overwrite) as files:
            return asyncio.run(run_batch(self.engine, ServerConfig(), files, at_once))  # type: ignore[arg-type]

    def answers(self) -> dict[str | None, dict[str, Any]]:
        lines = self.target.read_text().splitlines()
        return {answer["custom_id"]: answer for answer in map(json.loads, lines)}


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_every_request_is_answered_under_its_id(batch: Batch) -> None:
    completion = {"prompt": "abc", "max_tokens": 2}
    batch.write(
        *(request(f"r{i}", f"say {i}") for i in range(20)),
        "",
        request("c", url="/v1/completions", body=completion),
    )
    assert batch.run() == BatchCount(answered=21)
    answers = batch.answers()
    assert len(answers) == 21
    for i in range(20):
        response = answers[f"r{i}"]["response"]
        assert response["status_code"] == 200
        assert f"say {i}" in response["body"]["choices"][0]["message"]["content"]
        assert response["request_id"]
    assert answers["c"]["response"]["body"]["choices"][0]["text"] == "ab"


def test_a_request_that_the_server_refuses_fails_alone(batch: Batch) -> None:
    bad = request("bad", body={"messages": [{"role": "user", "content": "hi"}], "n": 0})
    batch.write(bad, request("good"))
    assert batch.run() == BatchCount(answered=1, failed=1)
    refused = batch.answers()["bad"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({"url": "/v1/completions", "body": {}}, "custom_id must be a string"),
        (request("x", method="GET"), "method must be POST"),
        (request("x", url="/metrics"), "url must be one of"),
        (request("x", body=[]), "body must be an object"),
        (request("x", body={"stream": True}), "a batch has no streams"),
        ("[" * 100_000, "not JSON"),
        ("{" + " " * (MAX_LINE_BYTES + 10) + "}", "longer than"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_line_that_is_no_request_says_so(batch: Batch, line: Any, said: str) -> None:
    batch.write(line, request("good"))
    assert batch.run() == BatchCount(answered=1, failed=1)
    failed = next(a for a in batch.answers().values() if a["error"])
    assert failed["error"]["message"].startswith("Line 1: ")
    assert said in failed["error"]["message"]
    assert failed["response"] is None


def test_an_id_that_stands_twice_is_answered_once(batch: Batch) -> None:
    batch.write(request("a"), request("a"))
    assert batch.run() == BatchCount(answered=1, failed=1)
    assert len(batch.engine.requests) == 1


def test_resuming_answers_what_is_missing(batch: Batch) -> None:
    batch.write(*(request(f"r{i}") for i in range(4)))
    batch.run()
    lines = batch.target.read_bytes().splitlines(keepends=True)
    # The last answer was being written when the machine went down.
    batch.target.write_bytes(lines[0] + lines[1] + lines[2][:30])
    asked = len(batch.engine.requests)
    assert batch.run(resume=True) == BatchCount(answered=2, kept=2)
    assert len(batch.engine.requests) == asked + 2
    assert set(batch.answers()) == {"r0", "r1", "r2", "r3"}


def test_an_output_that_exists_is_not_lost_by_accident(batch: Batch) -> None:
    batch.write(request("a"))
    batch.target.write_text("precious\n")
    with pytest.raises(ConfigError, match="--resume"):
        batch.run()
    assert batch.target.read_text() == "precious\n"
    batch.run(overwrite=True)
    assert set(batch.answers()) == {"a"}


def test_the_files_are_checked_before_a_model_is_loaded(batch: Batch) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        batch.run()
    batch.write(request("a"))
    batch.target = batch.source
    with pytest.raises(ConfigError, match="is the input file"):
        batch.run(overwrite=True)


def test_no_more_than_wanted_are_in_flight(batch: Batch) -> None:
    batch.write(*(request(f"r{i}") for i in range(12)))
    most = 0
    note = batch.engine._note

    def watch() -> None:
        nonlocal most
        most = max(most, len(batch.engine.running))
        note()

    batch.engine._note = watch  # type: ignore[method-assign]
    batch.run(at_once=3)
    assert most == 3
