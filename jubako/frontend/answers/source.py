"""How does a parser read text that is still being written?

A parser is a generator that reads like a function over the whole text. It yields events, and None
where it has to wait for more text; `Source` has what it reads with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from jubako.frontend.answers.events import Content, Event

Result = TypeVar("Result")

Reading = Generator[Event | None, None, Result]
"""A part of a parser: events and waits on the way, a result at the end."""

Wrap = Callable[[str], Event]
"""The event that a piece of text becomes."""


class Source:
    """Text that comes in pieces, read from the left."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False

    def feed(self, text: str) -> None:
        """More text has come."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def peek(self, count: int) -> Reading[str]:
        """The next `count` characters, which stay; fewer only at the end of the text."""
        while self._left < count and not self._ended:
            yield None
        return self._text[self._at : self._at + count]

    @property
    def _left(self) -> int:
        return len(self._text) - self._at

    def _take(self, count: int) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def accept(self, literal: str) -> Reading[bool]:
        """Take `literal` if it comes next."""
        # Not all of it has to be there to know that it is something else.
        while self._left < len(literal):
            if self._ended or not literal.startswith(self._text[self._at :]):
                return False
            yield None
        if not self._text.startswith(literal, self._at):
            return False
        self._take(len(literal))
        return True

    def run(self, pattern: re.Pattern[str], limit: int | None = None) -> Reading[str]:
        """Take the longest run of the characters that `pattern`, a repeated set, matches.

        At most `limit` of them.
        """
        taken = ""
        while True:
            match = pattern.match(self._text, self._at)
            size = match.end() - self._at if match else 0
            if limit is not None:
                size = min(size, limit - len(taken))
            taken += self._take(size)
            if self._left or self._ended or len(taken) == limit:
                return taken
            yield None

    def pass_run(self, pattern: re.Pattern[str], wrap: Wrap) -> Reading[None]:
        """Pass a run on, as `run` takes it and as `wrap` makes it, piece by piece."""
        while True:
            match = pattern.match(self._text, self._at)
            if match and match.end() > self._at:
                yield wrap(self._take(match.end() - self._at))
            if self._left or self._ended:
                return
            yield None

    def space(self) -> Reading[str]:
        """Take white space."""
        return (yield from self.run(_SPACE))

    def until(self, markers: Sequence[str], wrap: Wrap) -> Reading[str | None]:
        """Pass text on as `wrap` makes it, up to the first of `markers`, which is taken.

        The marker, or None where the text ends without one.
        """
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            if match := pattern.search(self._text, self._at):
                if match.start() > self._at:
                    yield wrap(self._take(match.start() - self._at))
                return self._take(len(match[0]))
            keep = 0 if self._ended else self._beginning_of(markers)
            if self._left > keep:
                yield wrap(self._take(self._left - keep))
            if self._ended:
                return None
            yield None

    def rest(self, wrap: Wrap) -> Reading[None]:
        """Pass everything on that is left."""
        while True:
            if self._left:
                yield wrap(self._take(self._left))
            if self._ended:
                return
            yield None

    def text_until(self, markers: Sequence[str]) -> Reading[tuple[str, str | None]]:
        """The text up to the first of `markers`, and the marker; None where the text ends."""
        pieces: list[str] = []
        reading = self.until(markers, Content)
        while True:
            try:
                event = next(reading)
            except StopIteration as stop:
                return "".join(pieces), stop.value
            if event is None:
                yield None
            else:
                pieces.append(event[0])

    def _beginning_of(self, markers: Sequence[str]) -> int:
        """Length of the longest end of the text with which one of `markers` may begin."""
        longest = min(max(map(len, markers)) - 1, self._left)
        for size in range(longest, 0, -1):
            tail = self._text[-size:]
            if any(marker.startswith(tail) for marker in markers):
                return size
        return 0


_SPACE = re.compile(r"\s*")
