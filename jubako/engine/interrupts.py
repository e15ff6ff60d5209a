"""How does an interrupt from the keyboard wait for the end of a step?

Between two steps an interrupt costs nothing: the caller aborts its requests and goes on using the
engine. In the middle of one it would leave scheduler and workers in different states.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise a `KeyboardInterrupt` of the body's time after the body; a second one at once.

    Does nothing outside the main thread, and where another handler is in place than Python's own.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(number, frame)
        pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
