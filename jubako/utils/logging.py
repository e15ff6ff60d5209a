"""How does Jubako write its log? One logger, one handler on stderr, set up once a process."""

from __future__ import annotations

import logging
import sys

ROOT_NAME = "jubako"
_FORMAT = "%(levelname)s %(asctime)s [%(process)d] %(name)s: %(message)s"
_TIME_FORMAT = "%m-%d %H:%M:%S"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the `sys.stderr` of the moment, so that redirected output stays redirected."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass


def setup_logging(level: str = "info") -> logging.Logger:
    """Send Jubako's log lines of at least `level` to stderr; calling it again changes the level.

    A program that embeds Jubako and does not call this keeps its own logging configuration.
    """
    logger = logging.getLogger(ROOT_NAME)
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, _TIME_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    return logger


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)
