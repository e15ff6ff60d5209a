"""Where does Jubako keep what it made once and can make again?"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def cache_dir() -> Path:
    """`JUBAKO_CACHE_DIR`, else `XDG_CACHE_HOME/jubako`, else `~/.cache/jubako`; not created."""
    own = os.environ.get("JUBAKO_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and Path(xdg).is_absolute():
        return Path(xdg) / "jubako"
    return Path.home() / ".cache" / "jubako"


@contextlib.contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """A file that appears at `target` whole, or not at all.

    Writers in several processes may race: each has its own temporary file, and the last rename
    wins. Parent folders are created. Raises `OSError` where the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
