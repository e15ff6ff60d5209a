"""Is what runs still what is on disk?

A run imports a model's file when its row comes. If somebody edits the tree meanwhile, new files
meet old ones that are already in memory: no tree ever had what then fails, or passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

FOLDERS = tuple(Path(__file__).parents[2] / name for name in ("jubako", "tests/exactness"))


class Sources:
    """The sources and the native library, as they were when this object was made."""

    def __init__(self, folders: Sequence[Path] = FOLDERS) -> None:
        self._folders = folders
        self._then = self._now()

    def changed(self) -> list[Path]:
        """Files that have come, gone or been written since."""
        now = self._now()
        return sorted(
            file for file in now.keys() | self._then if now.get(file) != self._then.get(file)
        )

    def _now(self) -> dict[Path, tuple[int, int]]:
        files = {}
        for folder in self._folders:
            for file in (*folder.rglob("*.py"), *folder.rglob("*.so")):
                try:
                    found = file.stat()
                except FileNotFoundError:
                    continue
                files[file] = (found.st_mtime_ns, found.st_size)
        return files


def told(changed: Sequence[Path]) -> str:
    """Those files in words."""
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return ", ".join(file.name for file in changed[:3]) + more
