"""Which tiny random models stand for the families?"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.models import families
from tests.models.sizes import LLAMA3, MIXED, SIZES, VOCAB, WINDOW, YARN, rope

transformers.logging.set_verbosity_error()

__all__ = ["CONFIGS", "MIXED", "SIZES", "VOCAB", "WINDOW", "reference_model"]

CONFIGS: dict[str, tuple[type, Any]] = {
    "gemma3": (
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(
            **{**SIZES, "hidden_size": 72},  # no square: the root is rounded in bfloat16
            head_dim=32,
            sliding_window=WINDOW,
            layer_types=MIXED,
            query_pre_attn_scalar=20,
            tie_word_embeddings=False,
            rope_parameters={
                "full_attention": rope(1e6, rope_type="linear", factor=8.0),
                "sliding_attention": rope(1e4),
            },
        ),
    ),
    "gemma3 tied, one KV head, capped": (
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(
            **{**SIZES, "num_key_value_heads": 1, "initializer_range": 0.1},
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=MIXED,
            query_pre_attn_scalar=16,
            final_logit_softcapping=3.0,
            attention_bias=True,
        ),
    ),
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES)),
    "llama tied, biased, llama3 rope": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            **{**SIZES, "num_key_value_heads": 4},
            head_dim=24,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
            tie_word_embeddings=True,
            rope_parameters=rope(500_000.0, **LLAMA3),
        ),
    ),
    "llama, linear rope": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**SIZES, rope_parameters=rope(rope_type="linear", factor=4.0)),
    ),
    "mistral": (
        MistralForCausalLM,
        lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=WINDOW),
    ),
    "mistral, no window": (
        MistralForCausalLM,
        lambda: MistralConfig(**SIZES, head_dim=32, sliding_window=None),
    ),
    "qwen2": (Qwen2ForCausalLM, lambda: Qwen2Config(**SIZES)),
    "qwen2 windows, yarn rope": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(
            **SIZES,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
            rope_parameters=rope(1e6, **YARN),
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**SIZES, head_dim=32)),
    "qwen3 windows": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(
            **SIZES,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=MIXED,
            tie_word_embeddings=True,
        ),
    ),
}
CONFIGS |= families.collect()


def reference_model(name: str) -> Any:
    """The transformers model, float32, with every parameter random and nothing at its default."""
    model_class, config = CONFIGS[name]
    torch.manual_seed(0)
    model = model_class(config())
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1 or path.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of a router; zeros would not show
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model.eval()
