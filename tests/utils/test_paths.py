"""Where the cache is, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from jubako.utils.paths import atomic_write, cache_dir


def test_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JUBAKO_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / "home" / ".cache" / "jubako"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_dir() == tmp_path / "home" / ".cache" / "jubako"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jubako"
    monkeypatch.setenv("JUBAKO_CACHE_DIR", "~/own")
    assert cache_dir() == tmp_path / "home" / "own"


def test_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file"
    for content in (b"first", b"second"):
        with atomic_write(target) as file:
            file.write(content)
        assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with contextlib.suppress(RuntimeError), atomic_write(target) as file:
        file.write(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
