"""Arcee (Arcee AI 2025): Llama, whose MLPs have no gate and square what ReLU lets through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jubako.config import JubakoConfig
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import PlainMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import kv_heads, rope_parameters, value


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
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of an Arcee model."""
        hidden_size = value(c, "hidden_size", 2560)
        heads = value(c, "num_attention_heads", 32)
        return cls(
            vocab_size=value(c, "vocab_size", 32_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 18_432),
            num_hidden_layers=value(c, "num_hidden_layers", 32),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, heads),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "relu2"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-5),
            attention_bias=value(c, "attention_bias", False),
            mlp_bias=value(c, "mlp_bias", False),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 4096)),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class ArceeDecoderLayer(PreNormLayer):
    """Attention and MLP, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            bias=args.attention_bias,
        )
        mlp = PlainMLP(args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class ArceeForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                ArceeDecoderLayer(args, config, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
