"""Calls in tags around a JSON object each: Hermes 2 Pro and 3, Qwen 2.5 and 3."""

from __future__ import annotations

from jubako.frontend.answers.events import Content
from jubako.frontend.answers.json_text import read_call
from jubako.frontend.answers.source import Reading, Source

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes(source: Source, tools: frozenset[str]) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, text around them."""
    while (yield from source.until((BEGIN,), Content)) is not None:
        space = yield from source.space()
        read = yield from read_call(source)
        if not read.called:
            yield Content(BEGIN + space + read.text)
            continue
        yield from source.text_until((END,))
