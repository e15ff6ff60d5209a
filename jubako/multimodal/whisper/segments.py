"""Who said what when, going by the timestamps in Whisper's answer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jubako.multimodal.whisper.tokens import WhisperTokens


class TimedTokens(NamedTuple):
    """Tokens of text spoken between two times, in seconds of the whole recording."""

    start: float
    end: float
    first: int
    """Place of the first token in the answer."""
    token_ids: list[int]
    """Without timestamps and other special tokens."""


def split_segments(
    answer: Sequence[int], tokens: WhisperTokens, begin: float, end: float
) -> list[TimedTokens]:
    """The segments in the answer to a piece of a recording from `begin` to `end` seconds.

    The prompt ended with the timestamp 0.00. A time is never outside of the piece, and never
    before one that came earlier; text after the last timestamp lasts until the end.
    """
    segments: list[TimedTokens] = []
    start = begin
    text: list[int] = []
    first = 0
    for place, token in enumerate(answer):
        seconds = tokens.seconds(token)
        if seconds is not None:
            at = min(max(begin + seconds, start), end)
            if text:
                segments.append(TimedTokens(start, at, first, text))
                text = []
            start = at
        elif token < tokens.end:
            if not text:
                first = place
            text.append(token)
    if text:
        segments.append(TimedTokens(start, end, first, text))
    return segments
