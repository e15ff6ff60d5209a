"""Calls behind a special token: Mistral and Ministral, Magistral's thoughts."""

from __future__ import annotations

import re

from jubako.frontend.answers.events import Arguments, Call, Content
from jubako.frontend.answers.json_text import MAX_NAME_CHARACTERS, read_call, read_value
from jubako.frontend.answers.source import Reading, Source

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME = re.compile(r"[\w.\-]*")
_ID = re.compile(r"\w*")


def mistral(source: Source, tools: frozenset[str]) -> Reading[None]:
    """`[TOOL_CALLS]` and a JSON list of calls, or since version 11 a name and arguments each."""
    while (yield from source.until((BEGIN,), Content)) is not None:
        space = yield from source.space()
        if (yield from source.accept("[")):
            yield from _list(source, BEGIN + space)
        else:
            yield from _named(source, BEGIN + space)


def _list(source: Source, before: str) -> Reading[None]:
    before += "["
    while True:
        before += yield from source.space()
        if (yield from source.accept("]")):
            return
        read = yield from read_call(source)
        if not read.called:
            yield Content(before + read.text)
            return
        before = ""
        if not read.whole:
            return
        yield from source.space()
        yield from source.accept(",")


def _named(source: Source, before: str) -> Reading[None]:
    name = yield from source.run(_NAME, MAX_NAME_CHARACTERS)
    text = before + name
    if (yield from source.accept(CALL_ID)):
        text += CALL_ID + (yield from source.run(_ID, MAX_NAME_CHARACTERS))
    marked = yield from source.accept(ARGUMENTS)
    text += ARGUMENTS if marked else ""
    text += yield from source.space()
    if not name or (yield from source.peek(1)) != "{":
        yield Content(text)
        return
    yield Call(name)
    yield from read_value(source, Arguments)
