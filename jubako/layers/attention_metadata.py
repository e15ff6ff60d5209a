"""What does a step tell the attention layers about its requests?

The record belongs to the kernels, which read it; this is its name for everything above them.
"""

from __future__ import annotations

from jubako.kernels.metadata import AttentionMetadata

__all__ = ["AttentionMetadata"]
