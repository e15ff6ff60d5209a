"""Masks are what the grammar allows, whatever was proposed before and taken back."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from jubako.errors import EngineGenerateError
from jubako.sampling_params import StructuredOutputsParams
from jubako.structured_output.grammars import grammar_of, limits
from jubako.structured_output.matcher import Matcher
from jubako.structured_output.tokenizer import make_tokenizer
from jubako.structured_output.vocabulary import Vocabulary

EOS = (1, 2)
TEXTS = ["a", "b", "ab", "ba", "abc", "c", "cc", "-", "1", "12", "é", "ca", "ab", "{", "}", '"']
TOKENS = [b"", b"</s>", b"<end>", *(text.encode() for text in TEXTS), b"", b"\xc3", b"\xa9"]
SPECIAL = [1, 2]
SIZE = 70
"""More than tokens have texts, and no multiple of 32."""
VOCABULARY = Vocabulary(TOKENS + [b""] * (SIZE - len(TOKENS)), SPECIAL)
WORDS = -(-SIZE // 32)


def make(regex: str) -> Matcher:
    from llguidance import LLMatcher

    grammar = grammar_of(StructuredOutputsParams(regex=regex))
    tokenizer = make_tokenizer(VOCABULARY, list(EOS))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    assert not matcher.is_error()
    return Matcher(matcher, frozenset(EOS))


def allowed(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def masks(matcher: Matcher, drafts: list[int]) -> list[set[int]]:
    rows = np.zeros((1 + len(drafts), WORDS), np.int32)
    matcher.fill(rows, drafts)
    return [allowed(row) for row in rows]


def token(text: str) -> int:
    return TOKENS.index(text.encode())


def test_masks_allow_what_can_still_match() -> None:
    matcher = make("a[bc]{2}")
    # Whatever begins a match; both tokens of the same text.
    assert masks(matcher, []) == [{token("a"), token("ab"), token("abc"), 15}]
    matcher.accept([token("a")])
    assert masks(matcher, []) == [{token("b"), token("c"), token("cc")}]
    matcher.accept([token("cc")])
    assert masks(matcher, []) == [set(EOS)]


def test_bytes_of_a_character_may_come_one_by_one() -> None:
    matcher = make("é|b")
    assert masks(matcher, []) == [{token("é"), token("b"), TOKENS.index(b"\xc3")}]
    matcher.accept([TOKENS.index(b"\xc3")])
    assert masks(matcher, []) == [{TOKENS.index(b"\xa9")}]


def test_special_tokens_and_holes_are_never_allowed() -> None:
    (mask,) = masks(make("(?s:.*)"), [])
    # The second byte of a character begins nothing.
    assert mask == {i for i, text in enumerate(TOKENS) if text and text != b"\xa9"}


def test_drafts_leave_no_trace() -> None:
    rng = random.Random(5)
    matcher, twin = make("[abc]{3,6}-1?"), make("[abc]{3,6}-1?")
    for _ in range(300):
        drafts = [rng.choice([*range(1, len(TOKENS)), -1, SIZE - 1]) for _ in range(4)]
        matcher.num_allowed(drafts)
        rows = masks(matcher, drafts)
        assert rows[0] == masks(twin, [])[0]
        if matcher.has_ended:
            matcher, twin = make("[abc]{3,6}-1?"), make("[abc]{3,6}-1?")
            continue
        choice = rng.choice(sorted(rows[0]))
        matcher.accept([choice])
        twin.accept([choice])


def test_masks_behind_drafts_are_those_of_having_taken_them() -> None:
    path = [token("a"), token("b"), token("c"), token("-")]
    drafts = masks(make("[abc]{3,6}-1?"), path)
    for count in range(len(path) + 1):
        matcher = make("[abc]{3,6}-1?")
        matcher.accept(path[:count])
        assert masks(matcher, [])[0] == drafts[count]


def test_drafts_are_kept_up_to_the_first_that_is_refused() -> None:
    matcher = make("ab-")
    a, b, dash = token("a"), token("b"), token("-")
    assert matcher.num_allowed([a, b, dash, 1]) == 4
    assert matcher.num_allowed([a, b, dash, 1, 1]) == 4
    assert matcher.num_allowed([a, a]) == 1
    assert matcher.num_allowed([1]) == 0
    assert matcher.num_allowed([-1]) == 0
    matcher.accept([a, b, dash, 2])
    assert matcher.num_allowed([1, 2]) == 2
    assert matcher.num_allowed([1, a]) == 1


def test_it_ends_where_it_may_end_and_only_once() -> None:
    matcher = make("ab?")
    with pytest.raises(EngineGenerateError, match="Token 1 "):
        matcher.accept([1])
    matcher.accept([token("a")])
    assert masks(matcher, []) == [{token("b"), *EOS}]
    matcher.accept([1])
    assert masks(matcher, [5]) == [set(EOS)] * 2
    matcher.accept([2, 1])
    with pytest.raises(EngineGenerateError):
        matcher.accept([token("b")])


def test_random_walks_end_in_matches() -> None:
    rng = random.Random(1)
    regex = "(ab|ca)*-[12]{1,3}é?"
    for _ in range(60):
        matcher, text = make(regex), b""
        while not matcher.has_ended:
            choice = rng.choice(sorted(masks(matcher, [])[0]))
            matcher.accept([choice])
            text += b"" if choice in EOS else TOKENS[choice]
        assert re.fullmatch(regex, text.decode())
