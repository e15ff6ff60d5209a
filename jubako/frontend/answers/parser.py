"""How is an answer taken apart while it is written?"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from jubako.frontend.answers.events import Arguments, Call, Content, Event, Reasoning
from jubako.frontend.answers.source import Reading, Source

Style = Callable[[Source, frozenset[str]], Reading[None]]
"""Reads a whole answer, given the names of the tools that may be called."""


class _Running:
    """A style at work on text that comes in pieces."""

    def __init__(self, style: Style, tools: frozenset[str]) -> None:
        self._source = Source()
        self._reading = style(self._source, tools)
        self._done = False

    def feed(self, text: str) -> Generator[Event, None, None]:
        self._source.feed(text)
        yield from self._events()

    def end(self) -> Generator[Event, None, None]:
        self._source.end()
        yield from self._events()

    def _events(self) -> Generator[Event, None, None]:
        while not self._done:
            try:
                event = next(self._reading)
            except StopIteration:
                self._done = True
                return
            if event is None:
                return
            yield event


@dataclass(frozen=True)
class AnswerStyle:
    """How a model writes its thoughts and its calls; None where it does not.

    `reasoning` makes the rest of the answer `Content`, which `calls` then reads.
    """

    reasoning: Style | None = None
    calls: Style | None = None


class AnswerParser:
    """Takes one answer apart.

    White space in front of a call and at the end of an answer with calls is dropped: it is how the
    model sets its calls, not what it says.
    """

    def __init__(self, style: AnswerStyle, tools: frozenset[str] = frozenset()) -> None:
        self._stages = [
            _Running(stage, tools) for stage in (style.reasoning, style.calls) if stage is not None
        ]
        self.calls = 0
        """How many calls have begun."""
        self._space = ""

    def feed(self, text: str) -> list[Event]:
        """What is new after `text`, the next piece of the answer."""
        return self._tidied(self._through(0, [Content(text)] if text else []))

    def end(self) -> list[Event]:
        """What is left when no more text comes."""
        events: list[Event] = []
        for i, stage in enumerate(self._stages):
            events += self._through(i + 1, list(stage.end()))
        events = self._tidied(events)
        if self._space and not self.calls:
            events.append(Content(self._space))
        return events

    def _through(self, first: int, events: list[Event]) -> list[Event]:
        """`events` of one stage, as the stages from `first` on see their content."""
        for stage in self._stages[first:]:
            passed: list[Event] = []
            for event in events:
                if isinstance(event, Content):
                    passed.extend(stage.feed(event.text))
                else:
                    passed.append(event)
            events = passed
        return events

    def _tidied(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                text = self._space + event.text
                shown = text.rstrip()
                self._space = text[len(shown) :]
                if not shown:
                    continue
                event = Content(shown)
            elif isinstance(event, Call):
                self.calls += 1
                self._space = ""
            kept.append(event)
        return kept


@dataclass
class ParsedCall:
    """A whole tool call; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    """The parts of a whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        """Take in what a parser has found."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case Call(name):
                    self.calls.append(ParsedCall(name))
                case Arguments(text):
                    self.calls[-1].arguments += text


def parse_answer(
    text: str, style: AnswerStyle, tools: frozenset[str] = frozenset()
) -> ParsedAnswer:
    """The parts of `text`, a whole answer."""
    parser = AnswerParser(style, tools)
    answer = ParsedAnswer()
    answer.add(parser.feed(text))
    answer.add(parser.end())
    return answer
