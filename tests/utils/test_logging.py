"""One logger, one handler, on the stderr of the moment."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from jubako.utils.logging import ROOT_NAME, get_logger, setup_logging


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    logger = logging.getLogger(ROOT_NAME)
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = before


def test_one_line_however_often_it_is_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    setup_logging("info")
    get_logger("jubako.some.module").info("the message")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("the message") == 1
    assert "jubako.some.module" in captured.err


def test_level_can_change(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    setup_logging("error")
    get_logger("jubako.x").warning("quiet")
    get_logger("jubako.x").error("loud")
    assert "quiet" not in (err := capsys.readouterr().err)
    assert "loud" in err
