"""gpt-oss."""

from __future__ import annotations

from transformers import GptOssConfig, GptOssForCausalLM

from tests.models.sizes import MIXED, SIZES, WINDOW, YARN, rope


def packable_config() -> GptOssConfig:
    """One whose experts' sizes are multiples of 32, as MXFP4 needs them."""
    return GptOssConfig(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
    )


CONFIGS = {
    "gpt-oss": (
        GptOssForCausalLM,
        lambda: GptOssConfig(
            **{**SIZES, "initializer_range": 0.2},
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            rope_parameters=rope(150_000.0, **YARN, truncate=False),
        ),
    ),
    "gpt-oss, one KV head, other clamps": (
        GptOssForCausalLM,
        lambda: GptOssConfig(
            **{**SIZES, "num_key_value_heads": 1},
            head_dim=24,
            num_local_experts=4,
            num_experts_per_tok=4,
            sliding_window=WINDOW,
            layer_types=MIXED,
            swiglu_limit=0.7,
            swiglu_alpha=1.2,
        ),
    ),
}
