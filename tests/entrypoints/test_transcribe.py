"""`LLM.transcribe`: the tokens of transformers, true times, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jubako import LLM, Transcription
from jubako.config import MultiModalConfig
from jubako.errors import ValidationError
from jubako.multimodal.audio.cutting import cut
from jubako.multimodal.audio.decode import load_audio
from jubako.multimodal.audio.log_mel import log_mel_features
from tests.multimodal import tiny_whisper as tiny
from tests.multimodal.whisper_oracle import Oracle

RECORDINGS = Path(__file__).parent.parent / "multimodal" / "recordings"
RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("whisper") / "tiny-whisper")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    with LLM(str(folder), max_audio_decode_duration_s=100.0, **options) as llm:
        yield llm


def speech(name: str) -> np.ndarray:
    return load_audio(RECORDINGS / name, MultiModalConfig())


def text_ids(answer: list[int]) -> list[int]:
    return [token for token in answer if token < tiny.END]


def expected(oracle: Oracle, samples: np.ndarray, prompt: list[int], timestamps: bool) -> list[int]:
    features = log_mel_features(samples, 80)
    return oracle.answer(features, prompt, tiny.NO_TIMES, timestamps)


def ids_of(result: Transcription) -> list[int]:
    return [token for segment in result.segments for token in segment.token_ids]


@pytest.mark.parametrize("name", ["museum.wav", "window.ogg", "morgen.flac"])
def test_the_tokens_are_those_of_transformers(llm: LLM, oracle: Oracle, name: str) -> None:
    result = llm.transcribe(RECORDINGS / name, language="de", task="translate")
    prompt = [tiny.START, tiny.DE, tiny.TRANSLATE, tiny.NO_TIMES]
    answer = expected(oracle, speech(name), prompt, timestamps=False)
    assert ids_of(result) == text_ids(answer)
    assert len(text_ids(answer)) > 1
    assert not set(answer) & set(tiny.SUPPRESSED)
    assert result.text == llm.get_tokenizer().decode(text_ids(answer)).strip()
    assert (result.language, result.task) == ("de", "translate")
    assert result.duration == len(speech(name)) / RATE
    (segment,) = result.segments
    assert (segment.start, segment.end) == (0.0, round(result.duration, 3))


def test_with_timestamps(llm: LLM, oracle: Oracle) -> None:
    result = llm.transcribe(RECORDINGS / "museum.wav", language="en", timestamps=True)
    prompt = [tiny.START, tiny.EN, tiny.TRANSCRIBE, tiny.ZERO]
    answer = expected(oracle, speech("museum.wav"), prompt, timestamps=True)
    assert ids_of(result) == text_ids(answer)
    assert any(token >= tiny.ZERO for token in answer)
    for segment in result.segments:
        assert 0.0 <= segment.start <= segment.end <= round(result.duration, 3)
        assert segment.avg_logprob is not None
        assert segment.avg_logprob < 0


def test_previous_text_goes_in_front(llm: LLM, oracle: Oracle) -> None:
    text = "the kitchen<|translate|>"
    result = llm.transcribe(RECORDINGS / "museum.wav", language="en", prompt=text)
    previous = [t for t in llm.get_tokenizer().encode(" " + text) if t < tiny.END]
    room = tiny.LENGTH // 2 - 1
    prompt = [tiny.PREVIOUS, *previous[-room:], tiny.START, tiny.EN, tiny.TRANSCRIBE, tiny.NO_TIMES]
    assert ids_of(result) == text_ids(expected(oracle, speech("museum.wav"), prompt, False))


def test_a_long_recording_is_cut_where_it_is_quiet(llm: LLM, oracle: Oracle) -> None:
    parts = [speech("museum.wav"), speech("window.ogg"), speech("morgen.flac")]
    samples = np.concatenate(parts * 7)
    result = llm.transcribe((samples, RATE), language="en")
    pieces = cut(samples)
    assert len(pieces) == 3
    prompt = [tiny.START, tiny.EN, tiny.TRANSCRIBE, tiny.NO_TIMES]
    assert len(result.segments) == 3
    for segment, (start, end) in zip(result.segments, pieces, strict=True):
        answer = expected(oracle, samples[start:end], prompt, timestamps=False)
        assert segment.token_ids == text_ids(answer)
        assert (segment.start, segment.end) == (round(start / RATE, 3), round(end / RATE, 3))


def test_a_list_gives_a_list(llm: LLM) -> None:
    paths = [RECORDINGS / "museum.wav", RECORDINGS / "morgen.flac"]
    results = llm.transcribe(list(paths), language="en")
    assert [r.text for r in results] == [llm.transcribe(p, language="en").text for p in paths]
    assert llm.transcribe([], language="en") == []


def test_no_language_is_english_with_a_warning(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    path = RECORDINGS / "museum.wav"
    with caplog.at_level(logging.WARNING, "jubako"):
        result = llm.transcribe(path)
    assert "taken to be English" in caplog.text
    assert result == llm.transcribe(path, language="english")


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"audio": b"nonsense"}, "media_unsupported", "WAV, FLAC, OGG, MP3"),
        ({"audio": b""}, "media_undecodable", "0 bytes"),
        ({"audio": (np.zeros(101 * RATE, np.float32), RATE)}, "media_too_large", "100 s"),
        ({"language": "xx"}, "invalid_value", "it knows en, de"),
        ({"language": 5}, "invalid_value", "language must be text"),
        ({"task": "sing"}, "invalid_value", "task must be"),
        ({"prompt": 5}, "invalid_value", "prompt must be text"),
        ({"temperature": -1.0}, "invalid_value", "temperature"),
    ],
)
def test_bad_input_is_refused_and_the_engine_goes_on(
    llm: LLM, change: dict[str, Any], code: str, told: str
) -> None:
    options = {"audio": RECORDINGS / "museum.wav", "language": "en"} | change
    with pytest.raises(ValidationError, match=told) as caught:
        llm.transcribe(**options)
    assert caught.value.code == code
    assert llm.transcribe(RECORDINGS / "museum.wav", language="en").segments


def test_one_bad_recording_refuses_the_call(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="0 bytes"):
        llm.transcribe([RECORDINGS / "museum.wav", b""], language="en")
    assert not llm.llm_engine.has_unfinished_requests()
