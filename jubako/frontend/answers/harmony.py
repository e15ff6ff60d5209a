"""Messages in channels: gpt-oss.

The format is described at https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re

from jubako.frontend.answers.events import Arguments, Call, Content, Reasoning
from jubako.frontend.answers.source import Reading, Source, Wrap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def harmony(source: Source, tools: frozenset[str]) -> Reading[None]:
    """Thoughts in the channel `analysis`, calls to a recipient, everything else for the user."""
    while True:
        # The prompt ends with a start and a role; a model that writes no header just answers.
        first = yield from source.peek(2)
        if first == "":
            return
        if first == "<|" or first[0].isspace():
            header, marker = yield from source.text_until((MESSAGE,))
        else:
            header, marker = yield from _role(source)
        if marker is None:
            if not header.lstrip().startswith("<|"):
                yield Content(header)
            return
        yield from _body(source, header)


def _role(source: Source) -> Reading[tuple[str, str | None]]:
    """A header that begins with a role, or an answer without one."""
    for role in ("assistant", "system", "developer", "user", "tool"):
        if (yield from source.accept(role)):
            header, marker = yield from source.text_until((MESSAGE,))
            return role + header, marker
    text, marker = yield from source.text_until(ENDS)
    return text, None


def _body(source: Source, header: str) -> Reading[None]:
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    wrap: Wrap = Content
    if recipient is not None and recipient[1] != "assistant":
        yield Call(recipient[1].removeprefix("functions."))
        wrap = Arguments
    elif channel is not None and channel[1] == "analysis":
        wrap = Reasoning
    yield from source.until(ENDS, wrap)
