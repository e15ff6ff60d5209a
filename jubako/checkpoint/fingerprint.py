"""What tells one content of a checkpoint's files, or of any others, from another, at little cost?

Reading gigabytes at every start would cost more than it saves. What is trusted: a file with the
same size, the same time of change and the same bytes in its head, its tail and at places spread
over it has the same content. Its name and folder do not matter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from jubako.checkpoint.info import Checkpoint

HEAD_BYTES = 64 * 1024
SAMPLES = 32
SAMPLE_BYTES = 4096


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """Of the weight files, in hex. Raises OSError where one cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for path in checkpoint.weight_files:
        _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        digest.update(f"{size} {status.st_mtime_ns};".encode())
        digest.update(os.pread(file.fileno(), HEAD_BYTES, 0))
        for i in range(1, SAMPLES + 1):
            place = max(0, size - SAMPLE_BYTES) * i // SAMPLES
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, place))


def code_fingerprint(package: Path, folders: Iterable[str]) -> str:
    """Of the Python files and libraries in these folders of a package: sizes, times, names."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in folders:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".so"):
                status = path.stat()
                name = path.relative_to(package)
                digest.update(f"{name} {status.st_size} {status.st_mtime_ns};".encode())
    return digest.hexdigest()
