"""Where is a long recording cut, so that no word is?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jubako.multimodal.audio.log_mel import MAX_SAMPLES, SAMPLE_RATE

SEARCHED = SAMPLE_RATE
"""Samples at the end of a piece in which the cut is looked for."""

WINDOW = 1600
"""Samples over which quietness is measured."""


class Piece(NamedTuple):
    """Samples `start` to `end` of a recording; pieces follow each other without gap or overlap."""

    start: int
    end: int


def cut(samples: np.ndarray, longest: int = MAX_SAMPLES) -> list[Piece]:
    """Pieces of at most `longest` samples of `samples` float [n].

    Each cut is in the middle of the quietest window in the last second that it may lie in.
    """
    pieces = []
    start = 0
    while len(samples) - start > longest:
        latest = start + longest
        earliest = latest - min(SEARCHED, longest - 1)
        end = earliest + _quietest(samples[earliest:latest])
        pieces.append(Piece(start, end))
        start = end
    pieces.append(Piece(start, len(samples)))
    return pieces


def _quietest(samples: np.ndarray) -> int:
    """The middle of the window of the least energy, the first of equal ones."""
    window = min(WINDOW, len(samples))
    energy = np.concatenate([[0.0], np.cumsum(samples.astype(np.float64) ** 2)])
    sums = energy[window:] - energy[:-window]
    # The running sum's rounding must not tell windows of pure silence apart.
    quiet = np.flatnonzero(sums <= sums.min() + 1e-12 * energy[-1])
    return int(quiet[0]) + (window + 1) // 2
