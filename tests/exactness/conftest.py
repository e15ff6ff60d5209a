"""The row at work: its model and engines serve all its cells, which run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.exactness.sizes import EVERYTHING, FULL, SAMPLE
from tests.exactness.subject import Subject


@pytest.fixture(scope="session")
def subject_of() -> Iterator[Callable[[str], Subject]]:
    """Name of a row → its subject. The one before is closed."""
    at_work: list[Subject] = []

    def get(name: str) -> Subject:
        if not at_work or at_work[0].name != name:
            while at_work:
                at_work.pop().close()
            at_work.append(Subject(name, FULL if EVERYTHING else SAMPLE))
        return at_work[0]

    yield get
    while at_work:
        at_work.pop().close()
