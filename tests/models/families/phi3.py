"""Tiny models of Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

from transformers import Phi3Config, Phi3ForCausalLM

from tests.models.sizes import SIZES, WINDOW, rope

SHORT = [1.0, 1.1, 1.3, 1.6, 1.9, 2.0]
LONG = [1.0, 2.0, 3.5, 4.0, 6.0, 9.0]

CONFIGS: dict[str, tuple[type, Any]] = {
    "phi3": (Phi3ForCausalLM, lambda: Phi3Config(**SIZES, sliding_window=WINDOW)),
    "phi4-mini": (
        Phi3ForCausalLM,
        lambda: Phi3Config(
            **SIZES,
            original_max_position_embeddings=256,
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
            rope_parameters=rope(
                rope_type="longrope", factor=4.0, short_factor=SHORT, long_factor=LONG
            ),
        ),
    ),
}
