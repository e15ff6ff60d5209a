"""Qwen2 and Qwen2.5 (Qwen Team 2024, arXiv 2407.10671).

Biases on the projections to queries, keys and values; late layers may have a sliding window.
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
from jubako.models.hf_config import SLIDING, late_window_layer_types, rope_parameters, value


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
    sliding_window: int | None
    layer_types: list[str]
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Qwen2 model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        num_layers = value(c, "num_hidden_layers", 32)
        # A null for the KV heads means one for each query head.
        kv_heads = value(c, "num_key_value_heads", heads if "num_key_value_heads" in c else 32)
        window = value(c, "sliding_window", 4096) if c.get("use_sliding_window") else None
        return cls(
            vocab_size=value(c, "vocab_size", 151_936),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 22_016),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6),
            sliding_window=window,
            layer_types=late_window_layer_types(c, num_layers, window),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 32_768)),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class Qwen2DecoderLayer(PreNormLayer):
    """Attention and MLP, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            bias=True,
            output_bias=False,
            sliding_window=args.sliding_window if args.layer_types[layer] == SLIDING else None,
        )
        mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                Qwen2DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
