"""Calls written as Python: Llama 4, Llama 3.2 1B and 3B, Gemma."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from jubako.frontend.answers.events import Arguments, Call, Content
from jubako.frontend.answers.json_text import MAX_NAME_CHARACTERS
from jubako.frontend.answers.source import Reading, Source

MAX_ARGUMENTS_CHARACTERS = 100_000
"""A longer list of arguments is text: it is parsed whole, which takes memory."""

BEGINS, ENDS = ("<|python_start|>", "<|python_tag|>"), ("<|python_end|>", "<|eom_id|>", "<|eot|>")

_NAME = re.compile(r"[\w.\-]*")
_INSIDE = re.compile(r"[^\"'()\[\]{}\\]*")
_NAMES = {"true": True, "false": False, "null": None}


def pythonic(source: Source, tools: frozenset[str]) -> Reading[None]:
    """`[name(key=value, ...), ...]`, nothing else; only `tools` are called."""
    space = yield from source.space()
    for begin in BEGINS:
        if (yield from source.accept(begin)):
            space += yield from source.space()
    if (yield from source.accept("[")):
        yield from read_list(source, tools, space + "[")
    elif space:
        yield Content(space)
    while (yield from source.until(ENDS, Content)) is not None:
        pass


def read_list(source: Source, tools: frozenset[str], before: str) -> Reading[bool]:
    """Calls up to the closing bracket; whether there was one. `before` is what was taken."""
    called = False
    while True:
        space = yield from source.space()
        if called and (yield from source.accept("]")):
            return True
        if called and (yield from source.accept(",")):
            space = yield from source.space()
        before += space
        text = yield from read_one(source, tools)
        if text is not None:
            if before + text:
                yield Content(before + text)
            return called
        called, before = True, ""


def read_one(source: Source, tools: frozenset[str]) -> Reading[str | None]:
    """Read one call; None, or what was taken if it is none."""
    name = yield from source.run(_NAME, MAX_NAME_CHARACTERS)
    space = yield from source.space()
    if name not in tools or not (yield from source.accept("(")):
        return name + space
    inside, ended = yield from _inside(source)
    arguments = _as_json(inside) if ended else None
    if arguments is None:
        return name + space + "(" + inside + (")" if ended else "")
    yield Call(name)
    yield Arguments(arguments)
    return None


def _inside(source: Source) -> Reading[tuple[str, bool]]:
    """The text up to the bracket that closes the call, and whether it came."""
    text, depth, quote = "", 0, ""
    while len(text) < MAX_ARGUMENTS_CHARACTERS:
        text += yield from source.run(_INSIDE, MAX_ARGUMENTS_CHARACTERS)
        character = yield from source.peek(1)
        if character == "":
            return text, False
        yield from source.accept(character)
        if character == "\\":
            character += yield from source.peek(1)
            yield from source.accept(character[1:])
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif depth == 0 and character == ")":
            return text, True
        elif character in ")]}":
            depth -= 1
        text += character
    return text, False


def _as_json(arguments: str) -> str | None:
    """JSON of keyword arguments that are all literals; None if they are not."""
    try:
        call = ast.parse(f"_({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = _literal(keyword.value)
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, items) if None not in keys:
            return {str(_literal(k)): _literal(v) for k, v in zip(keys, items) if k is not None}
    raise ValueError("not a literal")
