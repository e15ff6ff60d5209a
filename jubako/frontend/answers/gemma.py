"""Calls of Gemma: fenced or bare as Gemma 3 was asked for them, and FunctionGemma's own tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from jubako.frontend.answers.events import Arguments, Call, Content
from jubako.frontend.answers.json_text import MAX_NAME_CHARACTERS, read_call
from jubako.frontend.answers.pythonic import read_list, read_one
from jubako.frontend.answers.source import Reading, Source

FENCE = "```"
_FENCES = tuple(FENCE + tag for tag in ("tool_code", "tool_call", "json", "python"))


def gemma3(source: Source, tools: frozenset[str]) -> Reading[None]:
    """A JSON object, a list of them or Python calls, bare or in a fence; only `tools` are called.

    Bare calls are the whole answer; fenced ones may stand in text.
    """
    space = yield from source.space()
    text = yield from _calls(source, tools)
    if text is not None and space + text:
        yield Content(space + text)
    while (fence := (yield from source.until(_FENCES, Content))) is not None:
        space = yield from source.space()
        text = yield from _calls(source, tools)
        if text is not None:
            yield Content(fence + space + text)
            continue
        yield from source.text_until((FENCE,))


def _calls(source: Source, tools: frozenset[str]) -> Reading[str | None]:
    """Read calls of any kind; None, or what was taken if there was none."""
    if (yield from source.peek(1)) == "{":
        read = yield from read_call(source, tools)
        return None if read.called else read.text
    if (yield from source.accept("[")):
        space = yield from source.space()
        if (yield from source.peek(1)) != "{":
            return None if (yield from read_list(source, tools, "[" + space)) else ""
        read = yield from read_call(source, tools)
        if not read.called:
            return "[" + space + read.text
        while read.whole:
            yield from source.space()
            if not (yield from source.accept(",")):
                yield from source.accept("]")
                break
            yield from source.space()
            read = yield from read_call(source, tools)
        return None
    return (yield from read_one(source, tools))


CALL_BEGIN, CALL_END = "<start_function_call>", "<end_function_call>"
QUOTE = "<escape>"

_HEAD = re.compile(r"\s*call:([\w.\-]+)\s*")
_KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:\s*")
_BARE = re.compile(r"[^,{}\[\]]*")
_DEEPEST = 64


def functiongemma(source: Source, tools: frozenset[str]) -> Reading[None]:
    """`<start_function_call>call:name{key:<escape>text<escape>,...}<end_function_call>`."""
    while (yield from source.until((CALL_BEGIN,), Content)) is not None:
        text, end = yield from source.text_until((CALL_END, "<start_function_response>"))
        head = _HEAD.match(text)
        try:
            if head is None or len(head[1]) > MAX_NAME_CHARACTERS:
                raise ValueError
            arguments, stop = _value(text, head.end(), 0)
            if not isinstance(arguments, dict) or text[stop:].strip():
                raise ValueError
        except ValueError:
            yield Content(CALL_BEGIN + text + (end or ""))
            continue
        yield Call(head[1])
        yield Arguments(json.dumps(arguments, ensure_ascii=False))


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    opening = text[at : at + 1]
    if opening not in ("{", "["):
        bare = _BARE.match(text, at)
        assert bare is not None
        word = bare[0].strip()
        try:
            return json.loads(word), bare.end()
        except ValueError:
            return word, bare.end()
    closing = "}" if opening == "{" else "]"
    members: dict[str, Any] = {}
    items: list[Any] = []
    at += 1
    while True:
        if text.startswith(closing, at):
            return (members if opening == "{" else items), at + 1
        if opening == "{":
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError("no key")
            name, at = key[1].replace(QUOTE, ""), key.end()
            members[name], at = _value(text, at, depth + 1)
        else:
            item, at = _value(text, at, depth + 1)
            items.append(item)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(closing, at):
            raise ValueError("neither a comma nor an end")
