"""What the pages in docs/ show really runs."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"^<!-- needs (.*) -->$", re.MULTILINE)
"""What a page says of the packages without which it cannot run."""


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Each block and the line it begins at."""
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in FENCE.finditer(text)]


def run_page(name: str, text: str) -> None:
    """Run the blocks of a page one after the other, as one program."""
    program: dict[str, object] = {"__name__": "__main__"}
    for line, block in python_blocks(text):
        # Empty lines before it, so that an error names the line of the page.
        code = compile("\n" * (line - 1) + block, name, "exec")
        exec(code, program)


PAGES = sorted(page for page in DOCS.glob("**/*.md") if python_blocks(page.read_text("utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, monkeypatch):
    text = page.read_text("utf-8")
    needed = [name for line in NEEDS.findall(text) for name in line.split()]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the packages {', '.join(missing)}")
    # What a page writes does not stay; what it reads is found as in a clone.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").symlink_to(REPOSITORY / "tests")
        monkeypatch.chdir(folder)
        run_page(str(page), text)


def test_there_is_something_to_run():
    assert "kv-cache.md" in [page.name for page in PAGES]


def test_an_error_names_the_line_of_the_page():
    text = (
        "Text.\n\n```python\nn = 1\n```\n\nMore.\n\n```python\nassert n == 1\nassert n == 2\n```\n"
    )
    with pytest.raises(AssertionError) as caught:
        run_page("page.md", text)
    assert caught.traceback[-1].lineno + 1 == 11
