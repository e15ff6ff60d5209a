"""Rows of Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

FACTORS = [1.0, 1.8, 2.6, 3.4, 4.2, 5.0]
"""For a head of 16 of which three quarters turn.

The engine uses those of short or of long contexts for all, transformers changes from one to the
other as a sequence grows. So here they are the same; tests/layers compares the choice.
"""

CONFIGS: dict[str, Any] = {
    "phi3": lambda: transformers.Phi3Config(**SMALL, num_hidden_layers=3, sliding_window=96),
    "phi4-mini": lambda: transformers.Phi3Config(
        **SMALL,
        num_hidden_layers=3,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": FACTORS,
            "long_factor": FACTORS,
        },
    ),
}
