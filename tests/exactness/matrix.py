"""Which rows and columns has the matrix, which cells apply, and which does CI run?"""

from __future__ import annotations

from dataclasses import dataclass

from tests.exactness import rows
from tests.exactness.columns import COLUMNS, DoesNotApply
from tests.exactness.oracle import CONFIGS, is_recurrent
from tests.exactness.sources import Sources, told
from tests.exactness.subject import Subject

CELLS_OF_A_ROW = 5
"""Cells of each row that CI runs."""

ROWS = tuple(CONFIGS)
EXCEPTIONS = rows.exceptions()
SOURCES = Sources()


def reason_not(row: str, column: str) -> str | None:
    """Why a cell does not apply; None if it does."""
    own = EXCEPTIONS.get(row, {}).get(column)
    if own is not None:
        return own
    if COLUMNS[column].recurrent_only and not is_recurrent(row):
        return "no recurrent layers"
    return None


def sample() -> list[tuple[str, str]]:
    """A few cells of every row that together have every column, as evenly as they can."""
    uses = dict.fromkeys(COLUMNS, 0)
    chosen = []
    for index, row in enumerate(ROWS):
        applicable = [column for column in COLUMNS if reason_not(row, column) is None]
        turn = index % max(1, len(applicable))
        order = applicable[turn:] + applicable[:turn]
        for column in sorted(order, key=lambda column: uses[column])[:CELLS_OF_A_ROW]:
            uses[column] += 1
            chosen.append((row, column))
    return chosen


def every_cell() -> list[tuple[str, str]]:
    """All cells that apply."""
    return [(row, column) for row in ROWS for column in COLUMNS if not reason_not(row, column)]


@dataclass(frozen=True)
class Result:
    """What a cell has shown."""

    ties: int = 0
    reason: str | None = None
    """Why it does not apply."""
    fault: str | None = None
    """What is wrong."""


def run_cell(subject: Subject, column: str) -> Result:
    """Run a cell and say what happened; no exception of the cell gets out."""
    reason = reason_not(subject.name, column)
    if reason is not None:
        return Result(reason=reason)
    try:
        return Result(ties=COLUMNS[column].check(subject))
    except DoesNotApply as answer:
        return Result(reason=str(answer))
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        changed = SOURCES.changed()
        if changed:
            fault += f" [of no one tree: {told(changed)} changed while this ran]"
        return Result(fault=fault)
