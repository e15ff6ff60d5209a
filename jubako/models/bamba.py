"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba 2 layers, and a few of attention between them.

Every layer is followed by an MLP; attention rotates half of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import NativeRotation, Program, record
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mamba2 import Mamba2Args, Mamba2Mixer
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding, Rotation
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, norm_weights
from jubako.models.hf_config import kv_heads, rope_parameters, value
from jubako.models.mamba_config import ATTENTION, MAMBA, attention_indices, mamba2_args


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    kinds: list[str]
    mixer: Mamba2Args
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Bamba model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        num_layers = value(c, "num_hidden_layers", 32)
        eps = value(c, "rms_norm_eps", 1e-5)
        attention = attention_indices(c, num_layers)
        return cls(
            vocab_size=value(c, "vocab_size", 128_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 14_336),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=eps,
            attention_bias=value(c, "attention_bias", False),
            mlp_bias=value(c, "mlp_bias", False),
            kinds=[ATTENTION if i in attention else MAMBA for i in range(num_layers)],
            mixer=mamba2_args(c, hidden_size, eps, default_state=256),
            rope=rope_parameters(
                {"partial_rotary_factor": 0.5, **c}, value(c, "max_position_embeddings", 262_144)
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class BambaDecoderLayer(nn.Module):
    """Attention or a recurrence, and an MLP, each after a norm."""

    def __init__(self, args: ModelArgs, kind: str, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        self.self_attn: nn.Module | None = None
        self.mamba: nn.Module | None = None
        if kind == ATTENTION:
            self.self_attn = SelfAttention(
                args.hidden_size,
                args.num_attention_heads,
                args.num_key_value_heads,
                args.hidden_size // args.num_attention_heads,
                config=config,
                prefix=f"{prefix}.self_attn",
                bias=args.attention_bias,
            )
        else:
            self.mamba = Mamba2Mixer(args.mixer, config=config, prefix=f"{prefix}.mamba")
        self.feed_forward = GatedMLP(
            args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias
        )
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        inner = self.input_layernorm(x)
        if self.self_attn is not None:
            mixed = self.self_attn(inner, rotation)
        else:
            assert self.mamba is not None
            mixed = self.mamba(inner)
        x = mixed.add_(x)
        return self.feed_forward(self.pre_ff_layernorm(x)).add_(x)

    def record(self, program: Program, rotation: NativeRotation | None) -> None:
        """As `forward` of the stream, in a program."""
        x = program.normed(norm_weights(self.input_layernorm))
        if self.self_attn is not None:
            record(self.self_attn, program, x, rotation, to_stream=True)
        else:
            record(self.mamba, program, x, to_stream=True)
        x = program.normed(norm_weights(self.pre_ff_layernorm))
        record(self.feed_forward, program, x, to_stream=True)


class BambaForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                BambaDecoderLayer(args, kind, config, f"{prefix}model.layers.{i}")
                for i, kind in enumerate(args.kinds)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(
                args.hidden_size // args.num_attention_heads,
                args.rope,
                config.model_config.context_length,
            ),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        return super().sanitize(name.replace("final_layernorm.", "norm."))
