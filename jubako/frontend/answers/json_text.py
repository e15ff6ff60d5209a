"""How are JSON values read out of text that goes on behind them?"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from jubako.frontend.answers.events import Arguments, Call
from jubako.frontend.answers.source import Reading, Source, Wrap

NAME_KEYS = ("name",)
ARGUMENTS_KEYS = ("arguments", "parameters")

MAX_NAME_CHARACTERS = 256
"""Longer names of keys and tools are none."""

_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.\w]*")
_PLAIN = re.compile(r"[^\"{}\[\]]*")


class CallRead(NamedTuple):
    """What came of reading an object as a tool call.

    `text` is what was taken and has become no event: all of it where nothing was called.
    """

    called: bool
    whole: bool
    text: str


def read_string(source: Source, wrap: Wrap) -> Reading[bool]:
    """Pass on a JSON string, quotes included; whether it ended."""
    yield wrap((yield from source.peek(1)))
    yield from source.accept('"')
    while True:
        yield from source.pass_run(_STRING, wrap)
        if (yield from source.accept('"')):
            yield wrap('"')
            return True
        if not (yield from source.accept("\\")):
            return False
        escaped = yield from source.peek(1)
        yield from source.accept(escaped)
        yield wrap("\\" + escaped)


def read_value(source: Source, wrap: Wrap) -> Reading[bool]:
    """Pass on one JSON value, without checking what is inside; whether it ended."""
    first = yield from source.peek(1)
    if first == '"':
        return (yield from read_string(source, wrap))
    if first not in ("{", "["):
        scalar = yield from source.run(_SCALAR)
        if scalar:
            yield wrap(scalar)
        return bool(scalar)
    depth = 0
    while True:
        yield from source.pass_run(_PLAIN, wrap)
        next_ = yield from source.peek(1)
        if next_ == "":
            return False
        if next_ == '"':
            if not (yield from read_string(source, wrap)):
                return False
            continue
        yield from source.accept(next_)
        yield wrap(next_)
        depth += 1 if next_ in "{[" else -1
        if depth == 0:
            return True


def collect(reading: Reading[bool]) -> Reading[tuple[str, bool]]:
    """The text that `reading` would have passed on, and its result."""
    pieces: list[str] = []
    while True:
        try:
            event = next(reading)
        except StopIteration as stop:
            return "".join(pieces), stop.value
        if event is None:
            yield None
        else:
            pieces.append(event[0])


def read_call(source: Source, tools: frozenset[str] | None = None) -> Reading[CallRead]:
    """Read an object with a name and arguments as a tool call.

    With `tools`, any other name makes it no call. The arguments are passed on as they come once the
    name is known. An object that turns out not to be a call, or that is broken before it began one,
    comes back as text.
    """
    reader = _CallReader(tools)
    whole = yield from reader.read(source)
    return CallRead(reader.name is not None, whole, "" if reader.name else reader.text)


class _CallReader:
    def __init__(self, tools: frozenset[str] | None) -> None:
        self._tools = tools
        self.text = ""
        self.name: str | None = None
        self._waiting: str | None = None
        """Arguments that stood before the name."""
        self._has_arguments = False

    def read(self, source: Source) -> Reading[bool]:
        """Read the object; whether it ended as one does."""
        if not (yield from source.accept("{")):
            return False
        self.text += "{" + (yield from source.space())
        if not (yield from source.accept("}")):
            while True:
                if not (yield from self._member(source)):
                    return False
                self.text += yield from source.space()
                if (yield from source.accept("}")):
                    break
                if not (yield from source.accept(",")):
                    return False
                self.text += "," + (yield from source.space())
        self.text += "}"
        if self.name is not None and not self._has_arguments:
            yield Arguments("{}")
        return True

    def _member(self, source: Source) -> Reading[bool]:
        key, _ = yield from self._kept(source, string=True)
        self.text += yield from source.space()
        if not (yield from source.accept(":")):
            return False
        self.text += ":" + (yield from source.space())
        key = _decoded(key)
        if key in NAME_KEYS and self.name is None:
            return (yield from self._read_name(source))
        if key in ARGUMENTS_KEYS and not self._has_arguments and self._waiting is None:
            return (yield from self._read_arguments(source))
        _, ended = yield from self._kept(source)
        return ended

    def _kept(self, source: Source, string: bool = False) -> Reading[tuple[str, bool]]:
        """A value that is not passed on, and whether it ended."""
        if string and (yield from source.peek(1)) != '"':
            return "", False
        value, ended = yield from collect(read_value(source, Arguments))
        self.text += value
        return value, ended

    def _read_name(self, source: Source) -> Reading[bool]:
        value, ended = yield from self._kept(source)
        name = _decoded(value) if ended else ""
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            return False
        if self._tools is not None and name not in self._tools:
            return False
        self.name = name
        yield Call(name)
        if self._waiting is not None:
            self._has_arguments = True
            yield Arguments(self._waiting)
        return True

    def _read_arguments(self, source: Source) -> Reading[bool]:
        as_text = (yield from source.peek(1)) == '"'
        if self.name is not None and not as_text:
            self._has_arguments = True
            return (yield from read_value(source, Arguments))
        value, ended = yield from self._kept(source)
        if as_text and ended:
            value = _decoded(value)
        if self.name is None:
            self._waiting = value
        else:
            self._has_arguments = True
            yield Arguments(value)
        return ended


def _decoded(text: str) -> str:
    """The string that `text`, JSON, stands for; empty if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
