"""Calls as bare JSON objects: Llama 3.1 and later."""

from __future__ import annotations

from jubako.frontend.answers.events import Content
from jubako.frontend.answers.json_text import read_call
from jubako.frontend.answers.source import Reading, Source

TAG = "<|python_tag|>"
ENDS = ("<|eom_id|>", "<|eot_id|>")


def llama3_json(source: Source, tools: frozenset[str]) -> Reading[None]:
    """`{"name": ..., "parameters": {...}}`, several with a semicolon between, nothing else.

    Only objects that name one of `tools` are calls; other JSON is an answer.
    """
    space = yield from source.space()
    tag = yield from source.accept(TAG)
    if tag:
        yield from source.space()
    while (yield from source.peek(1)) == "{":
        read = yield from read_call(source, tools)
        if not read.called:
            yield Content(space + read.text)
            break
        space = yield from source.space()
        if (yield from source.accept(";")):
            space = yield from source.space()
    else:
        if space:
            yield Content(space)
    while (yield from source.until(ENDS, Content)) is not None:
        pass
