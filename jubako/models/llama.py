"""Llama (Touvron et al. 2023; Llama Team 2024), Mistral (Jiang et al. 2023) and Ministral.

They differ in a window that Mistral may have, in all layers or in some, and in defaults.
`LlamaSinkForCausalLM` is a Llama whose layers have `sink_len` learned keys and values before
position 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jubako.config import JubakoConfig
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import (
    FULL,
    SLIDING,
    kv_heads,
    layer_types,
    require_window,
    rope_parameters,
    value,
)


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    layer_types: list[str]
    sink_len: int
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any], architecture: str) -> ModelArgs:
        """Of a Llama, or with architecture `MistralForCausalLM` or `MinistralForCausalLM` of one
        of those.
        """
        mistral = architecture in ("MistralForCausalLM", "MinistralForCausalLM")
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        num_layers = value(c, "num_hidden_layers", 32)
        # A window that is null is none; only one that is left out has the default.
        window = _window(c) if mistral else None
        types = [FULL if window is None else SLIDING] * num_layers
        return cls(
            vocab_size=value(c, "vocab_size", 32_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 14_336 if mistral else 11_008),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8 if mistral else heads),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6),
            attention_bias=not mistral and value(c, "attention_bias", False),
            mlp_bias=not mistral and value(c, "mlp_bias", False),
            sliding_window=window,
            layer_types=(
                require_window(layer_types(c, num_layers, types), window) if mistral else types
            ),
            sink_len=value(c, "sink_len", 32) if architecture == "LlamaSinkForCausalLM" else 0,
            rope=rope_parameters(
                c, value(c, "max_position_embeddings", 131_072 if mistral else 2048)
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _window(c: Mapping[str, Any]) -> int | None:
    null = "sliding_window" in c and c["sliding_window"] is None
    return None if null else value(c, "sliding_window", 4096)


class LlamaDecoderLayer(PreNormLayer):
    """Attention and MLP, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            bias=args.attention_bias,
            sliding_window=args.sliding_window if args.layer_types[layer] == SLIDING else None,
            sink_len=args.sink_len,
        )
        mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class LlamaForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(
            config.model_config.hf_config, config.model_config.architecture
        )
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                LlamaDecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
