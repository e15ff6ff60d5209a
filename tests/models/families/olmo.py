"""Tiny models of OLMo 2 and 3."""

from __future__ import annotations

from typing import Any

from transformers import Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM

from tests.models.sizes import MIXED, SIZES, WINDOW, YARN, rope

CONFIGS: dict[str, tuple[type, Any]] = {
    "olmo2": (Olmo2ForCausalLM, lambda: Olmo2Config(**SIZES)),
    "olmo2 biased": (
        Olmo2ForCausalLM,
        lambda: Olmo2Config(**{**SIZES, "num_key_value_heads": 4}, attention_bias=True),
    ),
    "olmo3": (
        Olmo3ForCausalLM,
        lambda: Olmo3Config(
            **SIZES,
            sliding_window=WINDOW,
            layer_types=MIXED,
            rope_parameters={"sliding_attention": rope(5e5), "full_attention": rope(5e5, **YARN)},
        ),
    ),
}
