"""How are parts of a step timed, added up, and written for a trace viewer?"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "step"
"""The name of the outermost span."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. In nanoseconds; `self_time` leaves out the spans inside it."""

    name: str
    start: int
    length: int
    self_time: int
    depth: int
    detail: str = ""


class Recorder:
    """Spans of one thread, nested as the calls are."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._inside: list[int] = []
        """Time in inner spans so far, for each span that is open."""

    @contextmanager
    def span(self, name: str, detail: str = "") -> Iterator[None]:
        """Time what the `with` statement holds."""
        self._inside.append(0)
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            length = time.perf_counter_ns() - start
            inner = self._inside.pop()
            depth = len(self._inside)
            self.spans.append(Span(name, start, length, length - inner, depth, detail))
            if self._inside:
                self._inside[-1] += length

    def add(self, names: Sequence[str], details: Sequence[str], lengths: Sequence[int]) -> None:
        """Spans that ran one after the other and end now, all inside the open one."""
        total = sum(lengths)
        start, depth = time.perf_counter_ns() - total, len(self._inside)
        for name, detail, length in zip(names, details, lengths, strict=True):
            self.spans.append(Span(name, start, length, length, depth, detail))
            start += length
        if self._inside:
            self._inside[-1] += total

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time every call of `owner.method`, an attribute of this one object from now on."""
        function: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.span(name):
                return function(*arguments, **options)

        setattr(owner, method, timed)


def totals(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Per name the calls, and the time that no inner span has, the longest first.

    Shares are of all steps. What is left of a step under no name is called "rest of the step".
    """
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    whole = sum(span.length for span in spans if span.name == STEP) / 1e9
    for span in spans:
        name = "rest of the step" if span.name == STEP else span.name
        seconds[name] = seconds.get(name, 0.0) + span.self_time / 1e9
        calls[name] = calls.get(name, 0) + 1
    return [
        {
            "part": name,
            "calls": calls[name],
            "seconds": taken,
            "share": taken / whole if whole else 0.0,
        }
        for name, taken in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write the spans in the Trace Event format, which Perfetto and Chrome's tracing read."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "jubako"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "engine"}},
    ]
    begin = min((span.start for span in spans), default=0)
    for span in sorted(spans, key=lambda s: (s.start, s.depth)):
        event: dict[str, Any] = {
            "ph": "X",
            "name": span.name,
            "cat": "step",
            "pid": 1,
            "tid": 1,
            "ts": (span.start - begin) / 1000,
            "dur": span.length / 1000,
        }
        if span.detail:
            event["args"] = {"detail": span.detail}
        events.append(event)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
