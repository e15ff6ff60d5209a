"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219 and 2412.08905).

Checkpoints have the projections to queries, keys and values in one tensor, and those of the MLP.
Phi-4-mini turns a part of each head only; long contexts scale every frequency by its own factor.
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
from jubako.models.hf_config import integer_or_none, kv_heads, rope_parameters, value


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
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Phi-3 or Phi-4 model."""
        hidden_size = value(c, "hidden_size", 3072)
        heads = value(c, "num_attention_heads", 32)
        return cls(
            vocab_size=value(c, "vocab_size", 32_064),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 8192),
            num_hidden_layers=value(c, "num_hidden_layers", 32),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, heads),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-5),
            sliding_window=integer_or_none(c, "sliding_window"),
            rope=_rope(c),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _rope(c: Mapping[str, Any]) -> RopeParameters:
    length = value(c, "max_position_embeddings", 4096)
    original = value(c, "original_max_position_embeddings", 4096)
    rope = rope_parameters({**c, "original_max_position_embeddings": original}, length)
    # The scaling has had three names.
    kind = "longrope" if rope.rope_type in ("su", "yarn") else rope.rope_type
    scaling = {"partial_rotary_factor": 1.0, **rope.scaling}
    return RopeParameters(rope.theta, kind, scaling, length)


class Phi3DecoderLayer(PreNormLayer):
    """Attention and MLP, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            sliding_window=args.sliding_window,
        )
        mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class Phi3ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                Phi3DecoderLayer(args, config, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
