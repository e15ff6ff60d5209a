"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118).

Every other layer sees a window; scores and logits have a soft cap; norms on both sides of each half
of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, SandwichNormLayer
from jubako.models.hf_config import (
    FULL,
    SLIDING,
    layer_types,
    number_or_none,
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
    hidden_activation: str
    rms_norm_eps: float
    attention_bias: bool
    query_pre_attn_scalar: float
    sliding_window: int
    layer_types: list[str]
    rope: RopeParameters
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Gemma 2 model."""
        if c.get("use_bidirectional_attention"):
            raise UnsupportedModelError(
                "Gemma 2 with use_bidirectional_attention is an embedding model; "
                "only text generation is supported."
            )
        num_layers = value(c, "num_hidden_layers", 26)
        default_types = [SLIDING if i % 2 == 0 else FULL for i in range(num_layers)]
        return cls(
            vocab_size=value(c, "vocab_size", 256_000),
            hidden_size=value(c, "hidden_size", 2304),
            intermediate_size=value(c, "intermediate_size", 9216),
            num_hidden_layers=num_layers,
            num_attention_heads=value(c, "num_attention_heads", 8),
            num_key_value_heads=value(c, "num_key_value_heads", 4),
            head_dim=value(c, "head_dim", 256),
            hidden_activation=value(c, "hidden_activation", "gelu_pytorch_tanh"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6),
            attention_bias=value(c, "attention_bias", False),
            query_pre_attn_scalar=value(c, "query_pre_attn_scalar", 256.0),
            sliding_window=value(c, "sliding_window", 4096),
            layer_types=layer_types(c, num_layers, default_types),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 8192)),
            attn_logit_softcapping=_cap(c, "attn_logit_softcapping", 50.0),
            final_logit_softcapping=_cap(c, "final_logit_softcapping", 30.0),
            tie_word_embeddings=value(c, "tie_word_embeddings", True),
        )


def _cap(c: Mapping[str, Any], name: str, default: float) -> float | None:
    """A cap that is null is none; only one that is left out has the default."""
    return number_or_none({name: default, **c}, name)


class Gemma2DecoderLayer(SandwichNormLayer):
    """Attention and MLP, each between two norms."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            scale=args.query_pre_attn_scalar**-0.5,
            bias=args.attention_bias,
            sliding_window=args.sliding_window if args.layer_types[layer] == SLIDING else None,
            logits_soft_cap=args.attn_logit_softcapping,
        )
        mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_activation)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class Gemma2ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                Gemma2DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps, 1.0),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
            embed_scale=embed_tokens.root_of_size,
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(
            model,
            LMHead(args.vocab_size, args.hidden_size, tied_to, args.final_logit_softcapping),
        )
