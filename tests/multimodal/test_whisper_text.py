"""What Whisper's decoder is asked, and how its answer becomes segments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jubako.errors import CheckpointError, ValidationError
from jubako.multimodal.whisper.prompt import decoder_prompt
from jubako.multimodal.whisper.segments import split_segments
from jubako.multimodal.whisper.tokens import LANGUAGES, WhisperTokens

END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMES, ZERO = range(100, 109)
IDS = {
    "<|endoftext|>": END,
    "<|startoftranscript|>": START,
    "<|en|>": EN,
    "<|de|>": DE,
    "<|translate|>": TRANSLATE,
    "<|transcribe|>": TRANSCRIBE,
    "<|startofprev|>": PREVIOUS,
    "<|notimestamps|>": NO_TIMES,
}
TOKENS = WhisperTokens.of(IDS.get, multilingual=True)
ENGLISH = WhisperTokens.of(IDS.get, multilingual=False)


def prompt(tokens: WhisperTokens = TOKENS, **changes: Any) -> list[int]:
    options: dict[str, Any] = {"language": "en", "task": "transcribe", "timestamps": False}
    return decoder_prompt(tokens, max_target_positions=20, **options | changes)


def test_start_language_task_and_times() -> None:
    assert prompt() == [START, EN, TRANSCRIBE, NO_TIMES]
    assert prompt(language="de", task="translate") == [START, DE, TRANSLATE, NO_TIMES]
    assert prompt(timestamps=True) == [START, EN, TRANSCRIBE, ZERO]


def test_languages_by_code_or_name() -> None:
    assert prompt(language=" German") == prompt(language="DE") == prompt(language="de")
    for language in ("klingon", "", "fr", "<|de|>"):
        with pytest.raises(ValidationError, match="it knows en, de") as caught:
            prompt(language=language)
        assert caught.value.parameter == "language"
    assert len(LANGUAGES) == 100
    assert len(set(LANGUAGES.values())) == 100


def test_an_unknown_task() -> None:
    with pytest.raises(ValidationError, match="transcribe or translate, got 'summarise'"):
        prompt(task="summarise")


def test_previous_text_takes_up_to_half_and_keeps_its_end() -> None:
    begin = [PREVIOUS, 1, 2, 3]
    assert prompt(previous=[1, 2, 3]) == begin + prompt()
    long = prompt(previous=range(50))
    assert long == [PREVIOUS, *range(41, 50), *prompt()]
    assert len(long) - len(prompt()) == 10


def test_previous_text_cannot_give_orders() -> None:
    assert prompt(previous=[5, START, TRANSLATE, ZERO, END, 6]) == [PREVIOUS, 5, 6, *prompt()]
    assert prompt(previous=[START, END]) == prompt()


def test_a_model_of_english_only() -> None:
    assert prompt(ENGLISH) == [START, NO_TIMES]
    assert prompt(ENGLISH, language="english", timestamps=True) == [START, ZERO]
    with pytest.raises(ValidationError, match="it knows en"):
        prompt(ENGLISH, language="de")
    with pytest.raises(ValidationError, match="English only"):
        prompt(ENGLISH, task="translate")


def test_a_tokeniser_without_the_tokens() -> None:
    with pytest.raises(CheckpointError, match="startofprev"):
        WhisperTokens.of({**IDS, "<|startofprev|>": None}.get, multilingual=True)


# -- segments ---------------------------------------------------------------------------------


def at(seconds: float) -> int:
    return ZERO + round(seconds / 0.02)


def segments(answer: list[int], begin: float = 0.0, end: float = 30.0) -> list[Any]:
    return [tuple(s) for s in split_segments(answer, TOKENS, begin, end)]


def test_times_around_texts() -> None:
    answer = [1, 2, at(1.5), at(2.0), 3, at(3.22), at(3.22), 4, END]
    assert segments(answer, end=10.0) == [
        (0.0, 1.5, 0, [1, 2]),
        (2.0, 3.22, 4, [3]),
        (3.22, 10.0, 7, [4]),
    ]


def test_times_count_from_the_true_cut() -> None:
    answer = [1, at(1.5), at(2.0), 3, at(4.0), END]
    assert segments(answer, begin=29.4375, end=32.0) == [
        (29.4375, 30.9375, 0, [1]),
        (31.4375, 32.0, 3, [3]),
    ]


def test_no_text_no_segment() -> None:
    assert segments([]) == segments([END]) == segments([at(1.0), at(2.0), END]) == []


def test_times_beyond_the_last_token_are_none() -> None:
    assert TOKENS.seconds(at(30.0)) == 30.0
    assert TOKENS.seconds(at(30.0) + 1) is None
    assert TOKENS.seconds(NO_TIMES) is None


@given(st.lists(st.integers(0, at(30.0) + 3)), st.floats(0, 600), st.floats(0, 30))
def test_segments_stay_in_their_piece_and_keep_all_text(
    answer: list[int], begin: float, length: float
) -> None:
    found = split_segments(answer, TOKENS, begin, begin + length)
    edges = [edge for segment in found for edge in segment[:2]]
    assert edges == sorted(edges)
    assert all(begin <= edge <= begin + length for edge in edges)
    assert [t for s in found for t in s.token_ids] == [t for t in answer if t < END]
