"""Grammars are compiled once, by threads, for those who still want them; what fails fails alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jubako.errors import CheckpointError, JubakoError, UnsupportedModelError, ValidationError
from jubako.sampling_params import SamplingParams, StructuredOutputsParams
from jubako.scheduler.request import Request
from jubako.structured_output import manager as module
from jubako.structured_output.manager import StructuredOutputManager
from jubako.structured_output.vocabulary import Vocabulary
from tests.structured_output.test_matcher import EOS, SIZE, VOCABULARY, allowed, token


class Library:
    """A vocabulary that is read when `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.reads = 0

    def __call__(self) -> Vocabulary:
        assert self.open.wait(60)
        self.reads += 1
        if self.error is not None:
            raise self.error
        return VOCABULARY


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def manager(library: Library) -> Iterator[StructuredOutputManager]:
    made = StructuredOutputManager(library, SIZE, EOS)
    yield made
    library.open.set()
    made.shutdown()


def request(name: str, **form: Any) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    return Request(name, [3], params, eos_token_id=1)


def wait(manager: StructuredOutputManager, *requests: Request) -> None:
    """Ask once, then only when told that something has happened."""
    open_requests = {r.request_id: r for r in requests if not manager.is_ready(r)}
    for _ in range(10_000_000):
        for name in manager.take_ready():
            if name in open_requests and manager.is_ready(open_requests[name]):
                del open_requests[name]
        if not open_requests:
            return
    raise AssertionError("nobody said that the grammars are ready")


def test_each_goes_on_by_its_own_tokens(manager: StructuredOutputManager) -> None:
    requests = [request("a", regex="ab-"), request("b", regex="ab-"), request("c", regex="c+")]
    wait(manager, *requests)
    manager.accept_tokens(requests[1], [token("a")])
    rows = manager.grammar_bitmask(requests, {"b": [token("b")]})
    assert rows.dtype == np.int32
    assert [token("-") in allowed(row) for row in rows] == [False, False, True, False]
    assert allowed(rows[3]) == {token("c"), token("cc")}
    assert manager.validate_drafts(requests[1], [token("b"), token("b")]) == [token("b")]


def test_the_vocabulary_is_read_once_and_late(
    manager: StructuredOutputManager, library: Library
) -> None:
    assert library.reads == 0
    wait(manager, request("a", regex="a"), request("b", regex="b"))
    assert library.reads == 1


def test_equal_grammars_are_compiled_once(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    compile_one = manager._compile
    monkeypatch.setattr(manager, "_compile", lambda p: (made.append(p), compile_one(p))[1])
    wait(manager, *(request(str(i), regex="ab") for i in range(5)), request("x", regex="ba"))
    assert len(made) == 2


def test_what_cannot_be_compiled_says_so(manager: StructuredOutputManager) -> None:
    with pytest.raises(ValidationError, match="structured_outputs"):
        wait(manager, request("a", regex="x-"))
    wait(manager, request("b", regex="ab"))


def test_a_vocabulary_that_cannot_be_read(
    manager: StructuredOutputManager, library: Library
) -> None:
    library.error = CheckpointError("The tokeniser is damaged.")
    with pytest.raises(JubakoError, match="damaged"):
        wait(manager, request("a", regex="a"))


def test_a_model_without_an_end(library: Library) -> None:
    manager = StructuredOutputManager(library, SIZE, [])
    with pytest.raises(UnsupportedModelError, match="end-of-sequence"):
        wait(manager, request("a", regex="a"))
    manager.shutdown()


def test_nobody_waits_for_ever(
    manager: StructuredOutputManager, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    library.open.clear()
    slow = request("slow", regex="a")
    assert not manager.is_ready(slow)
    assert list(manager.take_ready()) == []
    now[0] = module.MAX_SECONDS + 1
    assert list(manager.take_ready()) == ["slow"]
    with pytest.raises(ValidationError, match="30 s"):
        manager.is_ready(slow)


def test_what_nobody_waits_for_is_not_compiled(
    manager: StructuredOutputManager, library: Library
) -> None:
    library.open.clear()
    # The threads are busy with these.
    first = [request(str(i), regex=f"a{{{i + 1}}}") for i in range(2)]
    for one in first:
        assert not manager.is_ready(one)
    twins = [request("x", regex="b+"), request("y", regex="b+")]
    for one in twins:
        assert not manager.is_ready(one)
    compilation = manager._waits["x"].compilation
    manager.release(twins[0])
    assert not compilation.future.cancelled()
    manager.release(twins[1])
    assert compilation.future.cancelled()
    library.open.set()
    for one in first:
        while not manager.is_ready(one):
            manager.take_ready()


def test_only_the_latest_are_kept(manager: StructuredOutputManager) -> None:
    for i in range(module._KEPT + 8):
        wait(manager, request(str(i), regex=f"a{{{i + 1}}}"))
    assert len(manager._compilations) == module._KEPT
