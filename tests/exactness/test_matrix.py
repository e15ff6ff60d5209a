"""Greedy tokens and logits equal transformers', whatever batch, cache, budget and pool do.

CI runs a few cells of every row; `make exactness` runs all, and writes docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness import matrix, table
from tests.exactness.columns import COLUMNS
from tests.exactness.sizes import EVERYTHING
from tests.exactness.subject import Subject

CELLS = matrix.every_cell() if EVERYTHING else matrix.sample()


@pytest.mark.parametrize(
    ("row", "column"), [pytest.param(*cell, id="-".join(cell)) for cell in CELLS]
)
def test_cell(row: str, column: str, subject_of: Callable[[str], Subject]) -> None:
    result = matrix.run_cell(subject_of(row), column)
    assert result.fault is None, result.fault
    if result.reason is not None:
        pytest.skip(result.reason)


def test_the_sample_has_every_row_and_every_column() -> None:
    cells = matrix.sample()
    assert {row for row, _ in cells} == set(matrix.ROWS)
    applicable = {column for _, column in matrix.every_cell()}
    assert {column for _, column in cells} == applicable
    assert len(cells) == len(set(cells))


def test_exceptions_name_rows_and_columns() -> None:
    for row, reasons in matrix.EXCEPTIONS.items():
        assert row in matrix.ROWS
        assert set(reasons) <= set(COLUMNS)


def test_the_page_shows_this_matrix() -> None:
    shown = table.read(table.PAGE.read_text("utf-8"))
    assert list(shown) == list(matrix.ROWS), "run `make exactness`"
    for row, cells in shown.items():
        assert list(cells) == list(COLUMNS), "run `make exactness`"
        for column, (text, reason) in cells.items():
            assert text != table.FAULT, f"{row}, {column}"
            known = matrix.reason_not(row, column)
            assert known is None or reason == known, (row, column)


def test_the_page_reads_as_it_was_written() -> None:
    rows = {
        "one": dict.fromkeys(COLUMNS, (table.EXACT, "")),
        "two": dict.fromkeys(COLUMNS, ("", "a reason")) | {"hits": ("= (2 ties)", "")},
    }
    assert table.read(table.page(rows)) == rows
    assert table.read("no table") == {}
