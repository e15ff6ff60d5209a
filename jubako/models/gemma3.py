"""Gemma 3, text (Gemma Team 2025, arXiv 2503.19786).

Five layers with a sliding window to one that sees everything, each kind with its own rotary base;
norms before and after attention and MLP; norms of query and key heads.
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
    make_rope_parameters,
    mapping,
    number_or_none,
    value,
)
from jubako.models.weights import text_part


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
    rope: dict[str, RopeParameters]
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> ModelArgs:
        """Of a text model, or of the text part of a multimodal one."""
        tied = value(hf_config, "tie_word_embeddings", True)
        c = mapping(hf_config, "text_config") or hf_config
        if c.get("use_bidirectional_attention"):
            raise UnsupportedModelError(
                "Gemma 3 with use_bidirectional_attention is an embedding model; "
                "only text generation is supported."
            )
        num_layers = value(c, "num_hidden_layers", 26)
        pattern = value(c, "sliding_window_pattern", value(c, "_sliding_window_pattern", 6))
        default_types = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]
        return cls(
            vocab_size=value(c, "vocab_size", 262_208),
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
            rope=_rope(c),
            attn_logit_softcapping=number_or_none(c, "attn_logit_softcapping"),
            final_logit_softcapping=number_or_none(c, "final_logit_softcapping"),
            tie_word_embeddings=value(c, "tie_word_embeddings", tied),
        )


def _rope(c: Mapping[str, Any]) -> dict[str, RopeParameters]:
    """Each kind of layer has its own base; scaling concerns the layers that see everything."""
    entries = mapping(c, "rope_parameters")
    if not any(isinstance(entries.get(kind), Mapping) for kind in (FULL, SLIDING)):
        entries = {FULL: entries}
    full = {**mapping(entries, FULL), **mapping(c, "rope_scaling")}
    sliding = mapping(entries, SLIDING)
    length = value(c, "max_position_embeddings", 131_072)
    return {
        FULL: make_rope_parameters(full, value(c, "rope_theta", 1_000_000.0), length),
        SLIDING: make_rope_parameters(sliding, value(c, "rope_local_base_freq", 10_000.0), length),
    }


class Gemma3DecoderLayer(SandwichNormLayer):
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
            qk_norm_eps=args.rms_norm_eps,
            qk_norm_offset=1.0,
            sliding_window=args.sliding_window if args.layer_types[layer] == SLIDING else None,
            logits_soft_cap=args.attn_logit_softcapping,
        )
        mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_activation)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class Gemma3ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        length = config.model_config.context_length
        model = DecoderModel(
            embed_tokens,
            [
                Gemma3DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps, 1.0),
            {
                kind: RotaryEmbedding(args.head_dim, args.rope[kind], length)
                for kind in dict.fromkeys(args.layer_types)
            },
            args.layer_types,
            embed_scale=embed_tokens.root_of_size,
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(
            model,
            LMHead(args.vocab_size, args.hidden_size, tied_to, args.final_logit_softcapping),
        )

    def sanitize(self, name: str) -> str | None:
        """The text part's name of a tensor; None for the image part and a tied head."""
        own = text_part(name)
        return None if own is None else super().sanitize(own)
