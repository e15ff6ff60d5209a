"""Tiny models of Llama with the ways to scale positions that tests/models/tiny.py lacks."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.sizes import SIZES, YARN, rope

DYNAMIC = rope(rope_type="dynamic", factor=4.0)
LONGROPE = rope(
    rope_type="longrope",
    factor=8.0,
    original_max_position_embeddings=256,
    short_factor=[1.0 + 0.2 * i for i in range(8)],
    long_factor=[4.0] * 8,
)

CONFIGS: dict[str, tuple[type, Any]] = {
    "llama, dynamic rope": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**SIZES, rope_parameters=DYNAMIC),
    ),
    "llama, longrope": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES, rope_parameters=LONGROPE)),
    "llama, yarn rope": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**SIZES, rope_parameters=rope(1e5, **YARN)),
    ),
}
