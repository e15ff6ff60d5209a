"""Where does the thinking of models that mark it with a pair of tags end?"""

from __future__ import annotations

from collections.abc import Callable

from jubako.frontend.answers.events import Content, Reasoning
from jubako.frontend.answers.source import Reading, Source


def think_tags(
    begin: str = "<think>", end: str = "</think>", *, inside: bool = False
) -> Callable[[Source, frozenset[str]], Reading[None]]:
    """A style whose thoughts stand between `begin` and `end`, in front of the answer.

    `inside` where the prompt has begun them already. Line breaks next to the tags are dropped.
    """

    def read(source: Source, tools: frozenset[str]) -> Reading[None]:
        space = yield from source.space()
        began = yield from source.accept(begin)
        if began or inside:
            yield from source.space()
            reading = source.until((end,), Reasoning)
            held = ""
            while True:
                try:
                    event = next(reading)
                except StopIteration:
                    break
                if event is None:
                    yield None
                    continue
                # White space is shown only once something follows it.
                text = held + event[0]
                shown = text.rstrip()
                held = text[len(shown) :]
                if shown:
                    yield Reasoning(shown)
            yield from source.space()
        elif space:
            yield Content(space)
        yield from source.rest(Content)

    return read
