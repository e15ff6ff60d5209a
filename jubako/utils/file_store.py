"""Where are large files kept that can be made again, without filling the disk?

A folder of files named by keys, each made of a subject and a version. One that is there is whole. A
new version replaces the others of its subject; the least recently used files go when a new one
needs their room. Whatever the disk refuses costs a warning and the file, nothing more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jubako.utils.logging import get_logger

FREE_SHARE = 20
"""One part in so many of the disk stays free."""

logger = get_logger(__name__)


class Key(NamedTuple):
    """What names a file."""

    subject: str
    """What it was made from."""
    version: str
    """Of what made it."""


class FileStore:
    """The files `*SUFFIX` of a folder, of at most `max_bytes` together."""

    def __init__(self, folder: Path, suffix: str, max_bytes: int) -> None:
        self.folder = folder
        self.suffix = suffix
        self.max_bytes = max_bytes

    def path(self, key: Key) -> Path:
        """Where the file of `key` is, if there is one."""
        return self.folder / f"{key.subject}-{key.version}{self.suffix}"

    def find(self, key: Key) -> Path | None:
        """The file of `key`, which counts as used now; None if there is none."""
        path = self.path(key)
        if not path.is_file():
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def remove(self, key: Key) -> None:
        """Let go of a file that turned out to be damaged."""
        with contextlib.suppress(OSError):
            self.path(key).unlink()

    def put(self, key: Key, num_bytes: int, write: Callable[[int], None]) -> bool:
        """Keep what `write` writes to the descriptor it is given, `num_bytes` long at most.

        False, with a line in the log, where it cannot be kept. A process that is already writing
        to the folder is not waited for.
        """
        if num_bytes > self.max_bytes:
            logger.info(
                "%.1f GiB are not kept in %s, which may take %.1f GiB.",
                num_bytes / 2**30,
                self.folder,
                self.max_bytes / 2**30,
            )
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._writing() as alone:
                if not alone or self.path(key).is_file():
                    return False
                self._make_room(key, num_bytes)
                self._write(key, write)
        except OSError as error:
            logger.warning("Nothing is kept in %s: %s.", self.folder, error.strerror or error)
            return False
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[bool]:
        """Whether this process is the folder's only writer."""
        with open(self.folder / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _make_room(self, key: Key, num_bytes: int) -> None:
        for left in self.folder.glob(f".*{self.suffix}.tmp"):
            left.unlink(missing_ok=True)  # of a writer that was killed: there is no other
        for old in self.folder.glob(f"{key.subject}-*{self.suffix}"):
            old.unlink(missing_ok=True)
        files = sorted(
            ((path.stat(), path) for path in self.folder.glob(f"*{self.suffix}")),
            key=lambda item: item[0].st_mtime_ns,
        )
        total = sum(status.st_size for status, _ in files)
        disk = os.statvfs(self.folder)
        free = (disk.f_bavail - disk.f_blocks // FREE_SHARE) * disk.f_frsize
        surplus = num_bytes - min(self.max_bytes - total, free)
        if surplus > total:
            raise OSError(f"the disk has no room for {num_bytes / 2**30:.1f} GiB more")
        for status, path in files:
            if surplus <= 0:
                return
            path.unlink(missing_ok=True)
            surplus -= status.st_size

    def _write(self, key: Key, write: Callable[[int], None]) -> None:
        handle, name = tempfile.mkstemp(
            prefix=f".{key.subject}.", suffix=f"{self.suffix}.tmp", dir=self.folder
        )
        try:
            try:
                write(handle)
            finally:
                os.close(handle)
            os.replace(name, self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
