"""A run that somebody edits the tree under says so, and writes no page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.exactness import matrix, table
from tests.exactness.columns import COLUMNS
from tests.exactness.sources import Sources, told


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("one.py", "two.py", "_native.so", "notes.md"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_what_was_written_and_what_came_and_went(tree: Path) -> None:
    sources = Sources([tree])
    assert sources.changed() == []
    (tree / "notes.md").write_text("no source")
    (tree / "one.py").write_text("another text")
    (tree / "two.py").unlink()
    (tree / "three.py").write_text("new")
    (tree / "_native.so").write_text("built anew")
    changed = {file.name for file in sources.changed()}
    assert changed == {"_native.so", "one.py", "three.py", "two.py"}
    assert told(sources.changed()) == "_native.so, one.py, three.py and 1 more"


def test_a_fault_of_no_one_tree_says_so(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(subject: object) -> int:
        raise ImportError("cannot import name")

    monkeypatch.setattr(matrix, "SOURCES", Sources([tree]))
    monkeypatch.setitem(matrix.COLUMNS, "alone", SimpleNamespace(check=fails, recurrent_only=False))
    subject = SimpleNamespace(name="llama")
    assert matrix.run_cell(subject, "alone").fault == "ImportError: cannot import name"
    (tree / "one.py").write_text("another text")
    fault = matrix.run_cell(subject, "alone").fault
    assert fault == (
        "ImportError: cannot import name [of no one tree: one.py changed while this ran]"
    )


class Here:
    """Runs what a pool of processes would, in this one."""

    def __init__(self, *given: object, **named: object) -> None:
        self.map = map

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *reason: object) -> None:
        pass

    def shutdown(self, **named: object) -> None:
        pass


@pytest.mark.parametrize("edited", [False, True])
def test_no_row_of_no_one_tree_is_written(
    tree: Path, edited: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(matrix.ROWS[:2])

    def run_row(name: str) -> dict[str, tuple[str, str]]:
        if edited and name == rows[1]:
            (tree / "one.py").write_text("another text")
        return dict.fromkeys(COLUMNS, (table.EXACT, ""))

    page = tree / "page.md"
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "Sources", lambda: Sources([tree]))
    monkeypatch.setattr(table, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(table, "run_row", run_row)
    monkeypatch.setattr("sys.argv", ["table", "--rows", *rows])
    assert table.main() == (2 if edited else 0)
    assert list(table.read(page.read_text("utf-8"))) == (rows[:1] if edited else rows)
    assert ("one.py changed" in capsys.readouterr().out) == edited
