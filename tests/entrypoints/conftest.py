"""The fake engine in place of the real one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.entrypoints.fake_llm_engine import FakeLLMEngine


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands set up logging for their process; here that is the tests' process."""
    logger = logging.getLogger("jubako")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLLMEngine]]:
    """`LLMEngine` is the fake one; the last made is `fake_engine.instances[-1]`."""
    monkeypatch.setattr("jubako.frontend.llm_engine.LLMEngine", FakeLLMEngine)
    FakeLLMEngine.instances = []
    yield FakeLLMEngine
    FakeLLMEngine.instances = []
