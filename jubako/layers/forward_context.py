"""What do layers know about the step that is running, beyond their inputs?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jubako.kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class ForwardContext:
    """Set by the runner around a model's forward pass."""

    attn_metadata: dict[str, AttentionMetadata] | None
    """By name of the attention layer. None: a profiling run, in which attention returns zeros."""


class _Running(threading.local):
    # Two engines in one process may step at the same time, each in its own thread.
    context: ForwardContext | None = None


_running = _Running()


@contextmanager
def set_forward_context(attn_metadata: dict[str, AttentionMetadata] | None) -> Iterator[None]:
    """Run a forward pass of this thread with this metadata; contexts nest."""
    outer = _running.context
    _running.context = ForwardContext(attn_metadata)
    try:
        yield
    finally:
        _running.context = outer


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass."""
    context = _running.context
    assert context is not None, "a model runs inside set_forward_context()"
    return context
