"""Does memory lie on huge pages? Reading weights through 4 KiB pages costs up to a fifth."""

from __future__ import annotations

from pathlib import Path

_SMAPS = Path("/proc/self/smaps")
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FIELDS = ("FilePmdMapped:", "AnonHugePages:", "ShmemPmdMapped:")


def can_ask() -> bool:
    """Whether plain memory gets huge pages when a program asks for them."""
    try:
        return "[never]" not in _ENABLED.read_text()
    except OSError:
        return False


def bytes_on_huge_pages(address: int, smaps: str | None = None) -> int:
    """Of the mapping that begins at `address`; 0 where the system does not tell.

    `smaps` is the text of `/proc/self/smaps`, by default that of now.
    """
    if smaps is None:
        try:
            smaps = _SMAPS.read_text()
        except OSError:
            return 0
    found, total = False, 0
    for line in smaps.splitlines():
        first, *rest = line.split(maxsplit=2)
        if "-" in first and not first.endswith(":"):
            if found:
                break
            found = int(first.partition("-")[0], 16) == address
        elif found and first in _FIELDS:
            total += int(rest[0]) * 1024
    return total
