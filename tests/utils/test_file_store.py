"""A folder of large files that can be made again: bounded, whole or absent, never an error."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from jubako.utils.file_store import FileStore, Key

SIZE = 1000


def content(byte: bytes = b"x", size: int = SIZE) -> Callable[[int], None]:
    def write(descriptor: int) -> None:
        os.write(descriptor, byte * size)

    return write


def key(subject: str, version: str = "1") -> Key:
    return Key(subject, version)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "made" / "here", ".big", 3 * SIZE)


def put(store: FileStore, name: str, age: int = 0) -> None:
    assert store.put(key(name), SIZE, content())
    path = store.path(key(name))
    os.utime(path, (1_000_000 - age, 1_000_000 - age))


def names(store: FileStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name != ".lock")


def test_what_was_put_is_found(store: FileStore) -> None:
    assert store.find(key("a")) is None
    assert store.put(key("a"), SIZE, content(b"q"))
    path = store.find(key("a"))
    assert path is not None
    assert path.read_bytes() == b"q" * SIZE
    store.remove(key("a"))
    assert store.find(key("a")) is None


def test_the_least_recently_used_go_first(store: FileStore) -> None:
    put(store, "a", age=3)
    put(store, "b", age=2)
    put(store, "c", age=1)
    assert store.find(key("a")) is not None  # now the newest
    assert store.put(key("d"), SIZE, content())
    assert names(store) == ["a-1.big", "c-1.big", "d-1.big"]


def test_a_new_version_replaces_the_old_one(store: FileStore) -> None:
    put(store, "a")
    put(store, "b")
    assert store.put(key("a", "2"), SIZE, content())
    assert names(store) == ["a-2.big", "b-1.big"]


def test_more_than_fits_changes_nothing(store: FileStore) -> None:
    put(store, "a")
    assert not store.put(key("b"), 3 * SIZE + 1, content())
    assert names(store) == ["a-1.big"]


def test_a_full_disk_costs_nothing_that_is_there(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, "a")
    real = os.statvfs(store.folder)
    full = os.statvfs_result((real[0], 1, 100, 5, 5, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert not store.put(key("b"), 2 * SIZE, content())
    assert "no room" in caplog.text
    assert names(store) == ["a-1.big"]


def test_a_writer_that_fails_leaves_nothing(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        os.write(descriptor, b"half")
        raise OSError(28, "No space left on device")

    assert not store.put(key("a"), SIZE, fail)
    assert "No space left on device" in caplog.text
    assert names(store) == []


def test_what_a_killed_writer_left_is_cleared_away(store: FileStore) -> None:
    put(store, "a")
    (store.folder / ".b.xyz.big.tmp").write_bytes(b"half")
    put(store, "c")
    assert names(store) == ["a-1.big", "c-1.big"]


def test_one_process_writes_at_a_time(store: FileStore) -> None:
    put(store, "a")
    with open(store.folder / ".lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not store.put(key("b"), SIZE, content())
    assert store.put(key("b"), SIZE, content())


def test_a_folder_that_cannot_be_made_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = FileStore(tmp_path / "file" / "folder", ".big", SIZE)
    assert store.find(key("a")) is None
    assert not store.put(key("a"), SIZE, content())
    assert "Nothing is kept" in caplog.text


def test_files_are_their_owners_alone(store: FileStore) -> None:
    put(store, "a")
    assert stat.S_IMODE(store.path(key("a")).stat().st_mode) == 0o600
