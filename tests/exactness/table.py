"""Run all cells of the matrix and write docs/exactness.md.

`python -m tests.exactness.table` runs all; with `--rows NAME ...` it runs those, and the other rows
of the page stay as they are. It stops where somebody edits the tree meanwhile: a row is a proof of
one tree only.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.exactness.sources import Sources, told

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"

EXACT, FAULT = "=", "FAULT"

HEAD = """\
# The exactness matrix

No batch, cache, budget or pool changes what a model answers to a greedy request. This table is the
proof, made by `make exactness`: each row is a tiny random model of one architecture, each column a
way to run it, and each cell compares {tokens} tokens of each answer with transformers in float32.

- `=`: every token is the one that transformers finds best after the tokens before it.
- `= (n ties)`: so, but for n tokens whose logit is less than {tie:g} below the best one. The
  answer after such a token is judged by what transformers says after that same token.
- A number: the cell does not apply; the reason is below the table.

CI runs some cells of every row, which together have every column.
"""


def run_row(name: str) -> dict[str, tuple[str, str]]:
    """Column → what the cell shows, and the reason or fault in words."""
    # Workers import PyTorch, the process that writes the page need not.
    from tests.exactness.columns import COLUMNS
    from tests.exactness.matrix import run_cell
    from tests.exactness.sizes import FULL
    from tests.exactness.subject import Subject

    cells = {}
    with Subject(name, FULL) as subject:
        for column in COLUMNS:
            result = run_cell(subject, column)
            if result.fault is not None:
                cells[column] = (FAULT, result.fault)
            elif result.reason is not None:
                cells[column] = ("", result.reason)
            else:
                ties = f" ({result.ties} tie{'s' * (result.ties != 1)})" if result.ties else ""
                cells[column] = (EXACT + ties, "")
    return cells


def page(rows: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    """The page of these results."""
    from tests.exactness.columns import COLUMNS
    from tests.exactness.oracle import TIE
    from tests.exactness.sizes import FULL

    reasons: dict[str, int] = {}
    lines = [
        "| model | " + " | ".join(COLUMNS) + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    for name, cells in rows.items():
        texts = []
        for text, reason in cells.values():
            if not text:
                text = str(reasons.setdefault(reason, len(reasons) + 1))
            texts.append(text)
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    meanings = [f"- **{column.name}**: {column.meaning}" for column in COLUMNS.values()]
    parts = [
        HEAD.format(tokens=FULL.max_tokens, tie=TIE),
        "\n".join(lines) + "\n",
        "## Cells that do not apply\n\n" + "\n".join(notes) + "\n",
        "## The columns\n\n" + "\n".join(meanings) + "\n",
    ]
    return "\n".join(parts)


def read(text: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Row → column → what the page shows, and the reason of a cell that does not apply."""
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    lines = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    if not lines:
        return {}
    header, _, *body = [[cell.strip() for cell in line.split("|")] for line in lines]
    rows = {}
    for name, *texts in body:
        cells = [("", reasons[text]) if text in reasons else (text, "") for text in texts]
        rows[name] = dict(zip(header[1:], cells, strict=True))
    return rows


def main() -> int:
    """Run, write, and return 1 if a cell has a fault, 2 if the sources changed."""
    sources = Sources()
    from tests.exactness.columns import COLUMNS
    from tests.exactness.matrix import ROWS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="run only these")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    given = parser.parse_args()
    names = given.rows or list(ROWS)
    faults = 0
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for name, cells in zip(names, pool.map(run_row, names)):
            changed = sources.changed()
            if changed:
                print(f"{name} and what follows is of no one tree: {told(changed)} changed")
                pool.shutdown(cancel_futures=True)
                return 2
            # After each row, so that a run that is interrupted keeps what it has shown.
            shown = read(PAGE.read_text("utf-8")) if PAGE.exists() else {}
            shown[name] = cells
            whole = {row: shown[row] for row in ROWS if list(shown.get(row, ())) == list(COLUMNS)}
            PAGE.write_text(page(whole), "utf-8")
            print(name, *(f"{column}:{text or 'n/a'}" for column, (text, _) in cells.items()))
            for column, (text, why) in cells.items():
                if text == FAULT:
                    faults += 1
                    print(f"  {column}: {why}")
            sys.stdout.flush()
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
