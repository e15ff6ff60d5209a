"""Recordings over HTTP: OpenAI's client against a real tiny Whisper."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from jubako import LLM, AsyncLLM
from tests.multimodal import tiny_whisper
from tests.serving.conftest import Serve, Served, events_of
from tests.serving.test_bad_input import check_error

RECORDINGS = Path(__file__).parent.parent / "multimodal" / "recordings"
MUSEUM = RECORDINGS / "museum.wav"
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_audio_decode_duration_s": 100.0,
    "max_audio_bytes": 200_000,
}
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper.make(tmp_path_factory.mktemp("serving") / "tiny-whisper")


@pytest.fixture(scope="module")
def served(serve_module: Serve, folder: Path) -> Served:
    engine = AsyncLLM(str(folder), **ENGINE)
    return serve_module(start=lambda: engine)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def long() -> bytes:
    """A minute of speech in a file of few bytes."""
    parts = [soundfile.read(RECORDINGS / "window.ogg", dtype="float32")[0]] * 14
    file = io.BytesIO()
    soundfile.write(file, np.concatenate(parts), 16_000, format="OGG", compression_level=1.0)
    return file.getvalue()


def post(served: Served, path: str = PATH, file: Any = None, **fields: Any) -> Any:
    file = MUSEUM.read_bytes() if file is None else file
    with served.client() as client:
        return client.post(path, data=fields, files={"file": ("speech.wav", file)})


# -- answers ----------------------------------------------------------------------------------


def test_openais_client_gets_the_text_of_llm(served: Served, llm: LLM) -> None:
    audio = served.openai().audio
    want = llm.transcribe(MUSEUM, language="de", prompt="Hello")
    got = audio.transcriptions.create(
        file=MUSEUM, model="tiny-whisper", language="de", prompt="Hello"
    )
    assert got.text == want.text != ""
    assert got.usage is not None
    assert got.usage.type == "duration"
    assert got.usage.seconds == 4
    want = llm.transcribe(MUSEUM, language="en", task="translate")
    got_translation = audio.translations.create(
        file=MUSEUM, model="tiny-whisper", extra_body={"language": "en"}
    )
    assert got_translation.text == want.text


def test_verbose_json_has_segments_with_true_times(served: Served, llm: LLM, long: bytes) -> None:
    want = llm.transcribe(long, language="en", timestamps=True)
    got = served.openai().audio.transcriptions.create(
        file=("speech.ogg", long),
        model="tiny-whisper",
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert got.text == want.text
    assert got.language == "english"
    assert abs(got.duration - want.duration) < 1e-3
    assert got.segments is not None
    assert [(s.start, s.end, s.text, s.tokens) for s in got.segments] == [
        (s.start, s.end, s.text, s.token_ids) for s in want.segments
    ]
    assert [s.id for s in got.segments] == list(range(len(got.segments)))
    assert {s.seek for s in got.segments} <= {0, *range(2900, 3001), *range(5800, 6001)}
    for given, segment in zip(got.segments, want.segments, strict=True):
        assert segment.avg_logprob is not None
        assert abs(given.avg_logprob - segment.avg_logprob) < 1e-4
        assert given.compression_ratio > 0


def test_plain_text_and_subtitles(served: Served, llm: LLM) -> None:
    plain = llm.transcribe(MUSEUM, language="en")
    answer = post(served, language="en", response_format="text")
    assert answer.text == plain.text + "\n"
    assert answer.headers["content-type"].startswith("text/plain")
    timed = llm.transcribe(MUSEUM, language="en", timestamps=True)
    for kind, point in (("srt", ","), ("vtt", ".")):
        answer = post(served, language="en", response_format=kind)
        assert answer.status_code == 200
        times = re.findall(rf"(\d\d:\d\d:\d\d\{point}\d{{3}}) --> (\S+)", answer.text)
        assert len(times) == len(timed.segments) > 0
        for (start, end), segment in zip(times, timed.segments, strict=True):
            assert (clock(start), clock(end)) == (segment.start, segment.end)
    assert answer.text.startswith("WEBVTT\n\n")


def clock(text: str) -> float:
    hours, minutes, seconds = text.replace(",", ".").split(":")
    return round(int(hours) * 3600 + int(minutes) * 60 + float(seconds), 3)


def test_a_stream_says_it_in_order(served: Served, llm: LLM, long: bytes) -> None:
    want = llm.transcribe(long, language="en")
    stream = served.openai().audio.transcriptions.create(
        file=("speech.ogg", long), model="tiny-whisper", language="en", stream=True
    )
    *deltas, done = list(stream)
    assert [event.type for event in deltas] == ["transcript.text.delta"] * len(deltas)
    assert len(deltas) > 3
    assert "".join(event.delta for event in deltas).strip() == want.text  # type: ignore[union-attr]
    assert done.type == "transcript.text.done"
    assert done.text == want.text


def test_a_stream_ends_like_others(served: Served) -> None:
    answer = post(served, language="en", stream="true")
    *_, done, last = events_of(answer.text)
    assert json.loads(done)["usage"] == {"type": "duration", "seconds": 4}
    assert last == "[DONE]"


def test_unknown_fields_are_told_and_neutral_ones_are_not(served: Served) -> None:
    answer = post(served, language="en", bogus="1", chunking_strategy="auto", temperature="0")
    assert answer.headers["x-jubako-warning"] == "unknown fields were ignored: bogus"
    assert "x-jubako-warning" not in post(served, language="en", top_p="1").headers
    assert "taken to be English" in post(served).headers["x-jubako-warning"]


def test_the_interface_is_described(served: Served) -> None:
    with served.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    for path in (PATH, "/v1/audio/translations"):
        content = paths[path]["post"]["requestBody"]["content"]
        assert content["multipart/form-data"]["schema"]["required"] == ["file"]


# -- what is refused --------------------------------------------------------------------------


def tone(seconds: float, kind: str = "FLAC") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(16_000 * seconds), np.float32), 16_000, format=kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "status", "code", "told"),
    [
        (b"<html></html>", 415, "media_unsupported", "WAV, FLAC, OGG, MP3"),
        (b"", 422, "media_undecodable", "0 bytes"),
        (tone(0.05), 422, "media_undecodable", "0.050 s"),
        (b"fLaC" + bytes(100), 422, "media_undecodable", "FLAC"),
        (tone(101), 413, "media_too_large", "100 s"),
        (bytes(200_001), 413, "media_too_large", "200001 bytes; at most 200000"),
        (bytes(3_000_000), 413, "media_too_large", "200000 bytes"),
    ],
    ids=["html", "empty", "short", "damaged", "long", "large", "huge"],
)
def test_recordings_that_are_none(
    served: Served, file: bytes, status: int, code: str, told: str
) -> None:
    error = check_error(post(served, file=file, language="en"), status, code, "file")
    assert told in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"language": "xx"}, 400, "invalid_value", "language"),
        ({"response_format": "docx"}, 400, "invalid_value", "response_format"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"temperature": "-1"}, 400, "invalid_value", "temperature"),
        ({"temperature": "nan"}, 400, "invalid_value", "temperature"),
        ({"stream": "maybe"}, 400, "invalid_value", "stream"),
        ({"stream": "true", "response_format": "srt"}, 400, "invalid_value", "stream"),
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"chunking_strategy": "server_vad"}, 400, "unsupported_parameter", "chunking_strategy"),
        ({"include[]": "logprobs"}, 400, "unsupported_parameter", "include"),
        (
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            400, "unsupported_parameter", "timestamp_granularities",
        ),
        ({"timestamp_granularities[]": "segment"}, 400, "invalid_value", "timestamp_granularities"),
        ({"prompt": "x" * 70_000}, 400, "invalid_value", None),
        ({f"f{i}": "1" for i in range(70)}, 400, "invalid_value", None),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_cannot_be(
    served: Served, fields: dict[str, str], status: int, code: str, param: str | None
) -> None:
    check_error(post(served, **{"language": "en"} | fields), status, code, param)


def test_forms_that_are_none(served: Served) -> None:
    with served.client() as client:
        check_error(client.post(PATH, json={"file": "x"}), 415, "unsupported_media_type")
        form = {"content-type": "multipart/form-data; boundary=x"}
        check_error(client.post(PATH, content=b"nothing", headers=form), 400, "invalid_value")
        no_boundary = {"content-type": "multipart/form-data"}
        check_error(client.post(PATH, content=b"", headers=no_boundary), 400, "invalid_value")
        no_file = [{"files": {"other": b"x"}}, {"data": {"file": "text"}, "files": {"x": b"y"}}]
        for form_parts in no_file:
            check_error(client.post(PATH, **form_parts), 400, "invalid_value", "file")
        two = [("file", ("a", b"1")), ("file", ("b", b"2"))]
        check_error(client.post(PATH, files=two), 400, "invalid_value")


def test_pages_of_other_origins_are_not_heard(served: Served) -> None:
    with served.client() as client:
        files = {"file": MUSEUM.read_bytes()}
        foreign = {"origin": "http://evil.example"}
        check_error(client.post(PATH, files=files, headers=foreign), 415, "unsupported_media_type")
        own = {"origin": served.url}
        answer = client.post(PATH, files=files, headers=own, data={"language": "en"})
        assert answer.status_code == 200


def test_openais_client_raises_its_own_errors(served: Served) -> None:
    create = served.openai().audio.transcriptions.create
    with pytest.raises(openai.UnprocessableEntityError):
        create(file=b"", model="tiny-whisper")
    with pytest.raises(openai.BadRequestError) as caught:
        create(file=MUSEUM, model="tiny-whisper", language="xx")
    assert caught.value.code == "invalid_value"


def test_a_model_that_writes_only_refuses(serve: Serve) -> None:
    check_error(post(serve(), language="en"), 400, "unsupported_task", "model")
