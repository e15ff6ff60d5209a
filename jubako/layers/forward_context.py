"""What do layers know about the step that is running, beyond their inputs?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jubako.kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class ForwardContext:
    """Set by the runner around a model's forward pass."""

    attn_metadata: dict[str, AttentionMetadata] | None
    """By name of the attention layer. None: a profiling run, in which attention returns zeros."""


_current: ForwardContext | None = None


@contextmanager
def set_forward_context(attn_metadata: dict[str, AttentionMetadata] | None) -> Iterator[None]:
    """Run a forward pass with this metadata; contexts nest."""
    global _current
    outer = _current
    _current = ForwardContext(attn_metadata)
    try:
        yield
    finally:
        _current = outer


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass."""
    assert _current is not None, "a model runs inside set_forward_context()"
    return _current
