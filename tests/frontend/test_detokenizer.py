"""Incremental detokenising: text as tokens come, stop strings, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.frontend.detokenizer import IncrementalDetokenizer, make_detokenizer
from jubako.frontend.tokenizer import Tokenizer
from jubako.sampling_params import SamplingParams

from . import vocabularies

SENTENCEPIECE = vocabularies.sentencepiece()
NO_PREFIX = vocabularies.sentencepiece(add_space_prefix=False)
BYTE_LEVEL = vocabularies.byte_level()
WORD_LEVEL = vocabularies.word_level()
TABLES = {"pieces": SENTENCEPIECE, "no-prefix": NO_PREFIX, "bytes": BYTE_LEVEL}
ALL = {**TABLES, "words": WORD_LEVEL}

kinds = pytest.mark.parametrize("tokenizer", TABLES.values(), ids=TABLES.keys())
all_kinds = pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL.keys())


def prompt_of(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("one" if tokenizer is WORD_LEVEL else "in ab")


def params(stop: str | list[str] | None = None, **options: object) -> SamplingParams:
    return SamplingParams(stop=stop, max_tokens=None, **options)  # type: ignore[arg-type]


def run(
    detokenizer: IncrementalDetokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,)
) -> tuple[list[str], str | None]:
    """Feed ids in updates of the given sizes; the deltas, and the stop string if one was found."""
    deltas: list[str] = []
    position = 0
    for turn in range(len(ids)):
        if position >= len(ids):
            break
        size = sizes[turn % len(sizes)]
        stop = detokenizer.update(ids[position : position + size], False)
        position += size
        finished = stop is not None or position >= len(ids)
        deltas.append(detokenizer.get_next_output_text(finished, True))
        if stop is not None:
            return deltas, stop
    return deltas, None


def characters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id a byte of the text: byte tokens, or the bytes of the alphabet."""
    names = {tokenizer.bytes_of(i): i for i in range(tokenizer.max_token_id, -1, -1)}
    return [names[bytes([byte])] for byte in text.encode()]


# -- text -------------------------------------------------------------------------------------


@all_kinds
@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1), skip=st.booleans())
def test_deltas_add_up_to_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.max_token_id + 2), max_size=30))
    prompt = prompt_of(tokenizer)
    detokenizer = make_detokenizer(tokenizer, prompt, params(skip_special_tokens=skip))
    deltas, _ = run(detokenizer, ids, sizes)
    whole = tokenizer.decode(prompt + ids, skip)[len(tokenizer.decode(prompt, skip)) :]
    assert "".join(deltas) == whole
    assert detokenizer.output_text == whole
    assert detokenizer.get_next_output_text(True, False) == whole
    assert detokenizer.token_ids == ids
    assert detokenizer.num_output_tokens() == len(ids)


@kinds
@settings(max_examples=200, deadline=None)
@given(text=st.text(min_size=1, max_size=20))
def test_no_delta_ends_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = make_detokenizer(tokenizer, prompt_of(tokenizer), params())
    deltas, _ = run(detokenizer, characters(tokenizer, text))
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas) or "\ufffd" in text
    # Each character comes with the byte that completes it, not later.
    assert [delta for delta in deltas if delta] == list(text)


@kinds
def test_unfinished_character_is_shown_when_the_request_finishes(tokenizer: Tokenizer) -> None:
    ids = characters(tokenizer, "a€")[:-1]
    detokenizer = make_detokenizer(tokenizer, prompt_of(tokenizer), params())
    detokenizer.update(ids, False)
    assert detokenizer.get_next_output_text(False, True) == "a"
    assert detokenizer.get_next_output_text(True, True) == "\ufffd"
    assert detokenizer.get_next_output_text(True, True) == ""
    assert detokenizer.output_text == "a\ufffd"


@kinds
def test_broken_bytes_do_not_hold_back_what_follows(tokenizer: Tokenizer) -> None:
    ids = characters(tokenizer, "€")[:2] * 3 + characters(tokenizer, "b")
    detokenizer = make_detokenizer(tokenizer, prompt_of(tokenizer), params())
    deltas, _ = run(detokenizer, ids)
    assert "".join(deltas) == "\ufffd\ufffd\ufffdb"
    assert deltas[2] == "\ufffd"


@kinds
def test_character_begun_in_the_prompt(tokenizer: Tokenizer) -> None:
    first, *rest = characters(tokenizer, "€")
    detokenizer = make_detokenizer(tokenizer, [*prompt_of(tokenizer), first], params())
    assert run(detokenizer, rest)[0] == ["", "€"]


def test_leading_space_belongs_to_the_output_after_a_prompt() -> None:
    and_id = SENTENCEPIECE.backend.token_to_id("▁and")
    after_text = make_detokenizer(SENTENCEPIECE, SENTENCEPIECE.encode("the"), params())
    assert run(after_text, [and_id, and_id])[0] == [" and", " and"]
    # The output begins the text: this is the space that SentencePiece put there.
    for prompt in ([], [SENTENCEPIECE.bos_token_id]):
        at_start = make_detokenizer(SENTENCEPIECE, prompt, params())
        assert run(at_start, [and_id, and_id])[0] == ["and", " and"]
    kept = make_detokenizer(NO_PREFIX, [], params())
    assert run(kept, [and_id])[0] == [" and"]


@kinds
def test_special_tokens_are_shown_on_demand(tokenizer: Tokenizer) -> None:
    special = tokenizer.eos_token_id
    assert special is not None
    ids = [*characters(tokenizer, "in"), special, special, *characters(tokenizer, "in")]
    name = tokenizer.id_to_token(special)
    for skip, spaces, text in (
        (True, True, "inin"),
        (False, True, f"in{name}{name}in"),
        (False, False, f"in{name}{name}in"),
    ):
        options = params(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        detokenizer = make_detokenizer(tokenizer, prompt_of(tokenizer), options)
        assert "".join(run(detokenizer, ids)[0]) == text


@all_kinds
def test_stop_token_is_recorded_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = [2, 3] if tokenizer is WORD_LEVEL else characters(tokenizer, "inan")
    before = make_detokenizer(tokenizer, prompt_of(tokenizer), params())
    before.update(ids[:-1], False)
    for include in (False, True):
        options = params(include_stop_str_in_output=include)
        detokenizer = make_detokenizer(tokenizer, prompt_of(tokenizer), options)
        assert detokenizer.update(ids, stop_terminated=True) is None
        shown = detokenizer.get_next_output_text(True, False)
        assert (shown == before.output_text) is not include
        assert detokenizer.token_ids == ids


def test_nothing_new_changes_nothing() -> None:
    detokenizer = make_detokenizer(NO_PREFIX, [], params("x"))
    assert detokenizer.update([], True) is None
    assert detokenizer.get_next_output_text(False, True) == ""
    assert detokenizer.num_output_tokens() == 0


@pytest.mark.parametrize("tokenizer", [None, NO_PREFIX])
def test_ids_without_text(tokenizer: Tokenizer | None) -> None:
    detokenizer = make_detokenizer(tokenizer, [1], params(detokenize=False))
    assert detokenizer.update([5, 6], False) is None
    assert detokenizer.token_ids == [5, 6]
    assert detokenizer.num_output_tokens() == 2
    assert detokenizer.output_text == detokenizer.get_next_output_text(True, True) == ""


# -- stop strings -----------------------------------------------------------------------------


def stopped(
    text: str, stop: str | list[str], sizes: Sequence[int] = (1,), **options: object
) -> tuple[str, str | None, list[str]]:
    detokenizer = make_detokenizer(NO_PREFIX, [], params(stop, **options))
    deltas, found = run(detokenizer, characters(NO_PREFIX, text), sizes)
    assert "".join(deltas) == detokenizer.output_text
    return detokenizer.output_text, found, deltas


def test_worked_example() -> None:
    names = [NO_PREFIX.backend.token_to_id(token) for token in ("a", "b", "c", "S", "T", "O", "P")]
    detokenizer = make_detokenizer(NO_PREFIX, [], params(["STOP", "xy"]))
    deltas = []
    for token in names[:-1]:
        assert detokenizer.update([token], False) is None
        deltas.append(detokenizer.get_next_output_text(False, True))
    assert detokenizer.update(names[-1:], False) == "STOP"
    deltas.append(detokenizer.get_next_output_text(True, True))
    # The last three characters are held back: they could be the beginning of STOP.
    assert deltas == ["", "", "", "a", "b", "c", ""]
    assert detokenizer.output_text == "abc"


def test_text_behind_the_stop_string_in_the_same_token_is_cut() -> None:
    ids = [NO_PREFIX.backend.token_to_id("STO"), *characters(NO_PREFIX, "x")]
    detokenizer = make_detokenizer(NO_PREFIX, [], params("T"))
    assert detokenizer.update(ids, False) == "T"
    assert detokenizer.get_next_output_text(True, True) == "S"
    assert detokenizer.token_ids == ids


@pytest.mark.parametrize("order", [1, -1])
def test_earliest_stop_string_wins_whatever_the_order(order: int) -> None:
    text, found, _ = stopped("xEARLYyLATE", ["LATE", "EARLY"][::order], sizes=(20,))
    assert (text, found) == ("x", "EARLY")


@pytest.mark.parametrize("order", [1, -1])
def test_of_those_that_start_together_the_longest_wins(order: int) -> None:
    text, found, _ = stopped("xSTOPy", ["ST", "STOP", "STO"][::order], sizes=(20,))
    assert (text, found) == ("x", "STOP")


def test_stop_string_over_several_updates() -> None:
    assert stopped("abSTOPcd", "STOP")[:2] == ("ab", "STOP")
    assert stopped("abSTOPcd", "STOP", sizes=(3,))[:2] == ("ab", "STOP")
    assert stopped("STSTOP", "STOP")[:2] == ("ST", "STOP")


def test_stop_string_is_kept_on_demand() -> None:
    text, found, deltas = stopped("abSTOPcd", "STOP", include_stop_str_in_output=True)
    assert (text, found) == ("abSTOP", "STOP")
    # Nothing needs to be held back then.
    assert deltas == list("abSTOP")
    assert stopped("abSTOPcd", "STOP", sizes=(20,), include_stop_str_in_output=True)[0] == "abSTOP"


def test_held_back_text_comes_at_the_end() -> None:
    text, found, deltas = stopped("abST", "STOP")
    assert (text, found) == ("abST", None)
    assert deltas == ["", "", "", "abST"]


@pytest.mark.parametrize("sizes", [(1,), (3,), (20,)])
def test_no_stop_string_ends_before_min_tokens(sizes: tuple[int, ...]) -> None:
    assert stopped("STOPabSTOPc", "STOP", sizes, min_tokens=5)[:2] == ("STOPab", "STOP")
    # It counts when its last token is the first that may end the text.
    assert stopped("abSTOPc", "STOP", sizes, min_tokens=5)[:2] == ("ab", "STOP")
    assert stopped("abSTOPc", "STOP", sizes, min_tokens=6)[:2] == ("abSTOPc", None)


def test_tokens_behind_the_end_add_no_text() -> None:
    detokenizer = make_detokenizer(NO_PREFIX, [], params("b"))
    assert detokenizer.update(characters(NO_PREFIX, "ab"), False) == "b"
    assert detokenizer.update(characters(NO_PREFIX, "cb"), False) is None
    assert detokenizer.get_next_output_text(True, False) == "a"


def test_unfinished_character_before_a_stop_string_is_not_added_behind_it() -> None:
    ids = characters(NO_PREFIX, "aSTOP") + characters(NO_PREFIX, "€")[:1]
    detokenizer = make_detokenizer(NO_PREFIX, [], params("STOP"))
    assert detokenizer.update(ids, False) == "STOP"
    assert detokenizer.get_next_output_text(True, True) == "a"


stop_lists = st.lists(st.text("abS", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abS€", max_size=25),
    stop=stop_lists,
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    min_tokens=st.integers(0, 12),
    include=st.booleans(),
)
def test_stop_strings_by_definition(
    text: str, stop: list[str], sizes: list[int], min_tokens: int, include: bool
) -> None:
    """Nothing of a stop string gets out, and the text ends where the definition says."""
    ids = characters(NO_PREFIX, text)
    options = params(stop, min_tokens=min_tokens, include_stop_str_in_output=include)
    detokenizer = make_detokenizer(NO_PREFIX, [], options)
    deltas, found = run(detokenizer, ids, sizes)
    expected_text, expected_stop = _by_definition(ids, stop, sizes, min_tokens, include)
    assert found == expected_stop
    assert "".join(deltas) == detokenizer.output_text == expected_text


def _by_definition(
    ids: list[int], stop: list[str], sizes: list[int], min_tokens: int, include: bool
) -> tuple[str, str | None]:
    decode = NO_PREFIX.decode
    position = turn = 0
    while position < len(ids):
        position += sizes[turn % len(sizes)]
        turn += 1
        # Characters of the tokens that may not end the text; an open character does not count.
        free = len(decode(ids[: min(min_tokens, len(ids))]).rstrip("\ufffd"))
        shown = decode(ids[:position])
        if position < len(ids):
            shown = shown.rstrip("\ufffd")
        matches = [
            (at, -len(s), s)
            for s in stop
            for at in range(len(shown))
            if shown.startswith(s, at) and at + len(s) > free
        ]
        if matches:
            at, negative, found = min(matches)
            return shown[: at - negative if include else at], found
    return decode(ids), None
