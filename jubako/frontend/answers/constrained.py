"""Answers that a grammar has made calls: a tool had to be called."""

from __future__ import annotations

from jubako.frontend.answers.events import Arguments, Call
from jubako.frontend.answers.json_text import read_call
from jubako.frontend.answers.parser import Style
from jubako.frontend.answers.source import Reading, Source


def call_list(source: Source, tools: frozenset[str]) -> Reading[None]:
    """A JSON list of calls and nothing else."""
    yield from source.space()
    yield from source.accept("[")
    while True:
        yield from source.space()
        read = yield from read_call(source)
        if not read.whole:
            return
        yield from source.space()
        if not (yield from source.accept(",")):
            return


def arguments_of(name: str) -> Style:
    """The style of an answer that is the arguments of one call to `name`."""

    def read(source: Source, tools: frozenset[str]) -> Reading[None]:
        yield Call(name)
        yield from source.rest(Arguments)

    return read
