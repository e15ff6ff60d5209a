"""Long recordings are cut where it is quiet, without losing or doubling a sample."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.multimodal.audio.cutting import SEARCHED, WINDOW, cut

LONGEST = 40_000


def loud(length: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, length).astype(np.float32)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 200_000), st.integers(1, LONGEST))
def test_pieces_make_the_recording_and_none_is_too_long(length: int, longest: int) -> None:
    longest = max(longest, 2000)
    pieces = cut(loud(length), longest)
    assert pieces[0].start == 0
    assert pieces[-1].end == length
    for before, after in itertools.pairwise(pieces):
        assert before.end == after.start
    assert all(piece.end - piece.start <= longest for piece in pieces)
    assert all(piece.end > piece.start for piece in pieces) or length == 0
    # Cuts lie in the last second.
    searched = min(SEARCHED, longest - 1)
    assert all(piece.end - piece.start >= longest - searched for piece in pieces[:-1])


def test_what_fits_is_not_cut() -> None:
    assert cut(loud(LONGEST), LONGEST) == [(0, LONGEST)]
    assert len(cut(loud(LONGEST + 1), LONGEST)) == 2


def test_the_cut_is_in_the_pause() -> None:
    samples = loud(60_000)
    pause = 33_000
    samples[pause : pause + WINDOW] = 0
    first, _ = cut(samples, LONGEST)
    assert first.end == pause + WINDOW // 2


def test_a_pause_before_the_last_second_is_not_looked_for() -> None:
    samples = loud(60_000)
    samples[10_000:14_000] = 0
    first, _ = cut(samples, LONGEST)
    assert first.end > LONGEST - SEARCHED


def test_the_quieter_of_two_pauses_is_taken_and_the_first_of_equal_ones() -> None:
    samples = loud(60_000)
    samples[27_000:29_000] *= 0.1
    samples[35_000:37_000] *= 0.01
    assert 35_000 < cut(samples, LONGEST)[0].end < 37_000
    samples = loud(60_000)
    samples[27_000:29_000] = 0
    samples[35_000:37_000] = 0
    assert cut(samples, LONGEST)[0].end == 27_000 + WINDOW // 2
