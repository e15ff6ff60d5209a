"""SmolLM3 (Hugging Face 2025): Llama, of which every fourth layer uses no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jubako.config import JubakoConfig
from jubako.errors import CheckpointError
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import EVERY, DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import (
    FULL,
    SLIDING,
    integer_or_none,
    kv_heads,
    layer_types,
    require_window,
    rope_parameters,
    value,
)

NONE = "none"
"""The kind of a layer without positions."""


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
    rotates: list[bool]
    """Whether each layer uses positions."""
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a SmolLM3 model."""
        hidden_size = value(c, "hidden_size", 2048)
        heads = value(c, "num_attention_heads", 16)
        num_layers = value(c, "num_hidden_layers", 36)
        rotates = _rotates(c, num_layers)
        window = integer_or_none(c, "sliding_window")
        if not value(c, "use_sliding_window", False):
            window = None
        # A window is for the layers without positions.
        types = [SLIDING if window is not None and not r else FULL for r in rotates]
        return cls(
            vocab_size=value(c, "vocab_size", 128_256),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 11_008),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 4),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6),
            attention_bias=value(c, "attention_bias", False),
            mlp_bias=value(c, "mlp_bias", False),
            sliding_window=window,
            layer_types=require_window(layer_types(c, num_layers, types), window),
            rotates=rotates,
            rope=rope_parameters(c, value(c, "max_position_embeddings", 32_768), 2_000_000.0),
            tie_word_embeddings=value(c, "tie_word_embeddings", True),
        )


def _rotates(c: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Entries of `no_rope_layers` are 1 for a layer that does use positions."""
    interval = value(c, "no_rope_layer_interval", 4)
    entries = c.get("no_rope_layers")
    if entries is None:
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(entries, list) or any(entry not in (0, 1) for entry in entries):
        raise CheckpointError(
            f"no_rope_layers in config.json must be a list of 0 and 1, got {str(entries)[:60]}."
        )
    if len(entries) != num_layers:
        raise CheckpointError(
            f"no_rope_layers in config.json has {len(entries)} entries for {num_layers} layers."
        )
    return [bool(entry) for entry in entries]


class SmolLM3DecoderLayer(PreNormLayer):
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
        )
        mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                SmolLM3DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
            [EVERY if rotates else NONE for rotates in args.rotates],
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
