"""Calls between full-width special tokens: DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from jubako.frontend.answers.events import Arguments, Call, Content
from jubako.frontend.answers.json_text import read_value
from jubako.frontend.answers.source import Reading, Source

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
SENTENCE_END = "<｜end▁of▁sentence｜>"


def deepseek(source: Source, tools: frozenset[str]) -> Reading[None]:
    """V3: a type, a name and arguments in a JSON fence; V3.1: a name, then arguments."""
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, SENTENCE_END)
    while (marker := (yield from source.until(markers, Content))) is not None:
        if marker == CALL_BEGIN:
            yield from _call(source)


def _call(source: Source) -> Reading[None]:
    first, separator = yield from source.text_until((SEPARATOR, CALL_END))
    if separator != SEPARATOR:
        yield Content(CALL_BEGIN + first + (separator or ""))
        return
    yield from source.space()
    name = first
    if (yield from source.peek(1)) != "{":
        name, _ = yield from source.text_until(("\n",))
        yield from source.space()
        if (yield from source.accept("```json")):
            yield from source.space()
    if not name.strip():
        yield Content(CALL_BEGIN + first + SEPARATOR)
        return
    yield Call(name.strip())
    if (yield from read_value(source, Arguments)):
        yield from source.text_until((CALL_END,))
