"""How does memory that a program has freed get back to the system?"""

from __future__ import annotations

import ctypes
import gc


def give_back_freed_memory() -> None:
    """Have the C library return what it keeps for later, where it can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
