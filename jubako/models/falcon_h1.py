"""Falcon-H1 (TII 2025): attention and Mamba 2 side by side in every layer.

Both read the same normalised input and their answers are added, each scaled by constants that were
found in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import NativeRotation, Program, Rows, record
from jubako.layers.activation import gated_activation, gated_form
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from jubako.layers.mamba2 import Mamba2Args, Mamba2Mixer
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding, Rotation
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, norm_weights
from jubako.models.hf_config import integer_or_none, kv_heads, rope_parameters, value
from jubako.models.mamba_config import mamba2_args, multipliers


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
    mixer: Mamba2Args
    rope: RopeParameters
    tie_word_embeddings: bool
    embedding_multiplier: float
    lm_head_multiplier: float
    key_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    mlp_multipliers: list[float]
    """Of the gate before its activation, and of the answer."""

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Falcon-H1 model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        eps = value(c, "rms_norm_eps", 1e-5)
        norm = value(c, "mamba_rms_norm", False)
        mixer = mamba2_args(
            c,
            hidden_size,
            eps,
            default_state=256,
            intermediate_size=integer_or_none(c, "mamba_d_ssm") if "mamba_d_ssm" in c else 1024,
        )
        return cls(
            vocab_size=value(c, "vocab_size", 128_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 14_336),
            num_hidden_layers=value(c, "num_hidden_layers", 32),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=eps,
            attention_bias=value(c, "attention_bias", False),
            mlp_bias=value(c, "mlp_bias", False),
            mixer=replace(
                mixer,
                out_bias=value(c, "projectors_bias", False),
                norm=norm,
                norm_groups=mixer.num_groups,
                norm_before_gate=value(c, "mamba_norm_before_gate", True),
                multipliers=tuple(multipliers(c, "ssm_multipliers", 5)),
            ),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 8192)),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
            embedding_multiplier=value(c, "embedding_multiplier", 1.0),
            lm_head_multiplier=value(c, "lm_head_multiplier", 1.0),
            key_multiplier=value(c, "key_multiplier", 1.0),
            attention_in_multiplier=value(c, "attention_in_multiplier", 1.0),
            attention_out_multiplier=value(c, "attention_out_multiplier", 1.0),
            ssm_in_multiplier=value(c, "ssm_in_multiplier", 1.0),
            ssm_out_multiplier=value(c, "ssm_out_multiplier", 1.0),
            mlp_multipliers=multipliers(c, "mlp_multipliers", 2),
        )


class FalconH1MLP(nn.Module):
    """`down(act(gate(x) · m₀) · up(x)) · m₁`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size = args.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            args.hidden_size, {"gate_proj": size, "up_proj": size}, args.mlp_bias
        )
        self.down_proj = RowParallelLinear(size, args.hidden_size, args.mlp_bias)
        self.activation = gated_activation(args.hidden_act)
        self.form = gated_form(args.hidden_act)
        self.gate_multiplier, self.down_multiplier = args.mlp_multipliers
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        gate_up = self.gate_up_proj(x)
        gate_up[:, : self.size] *= self.gate_multiplier
        return self.down_proj(self.activation(gate_up)).mul_(self.down_multiplier)

    def record(self, program: Program, x: Rows) -> Rows:
        """As `forward` but for the last multiplier, in a program."""
        gate_up = self.gate_up_proj.record(program, x, "gate up")
        gate = gate_up.columns(0, self.size)
        program.pointwise(gate, "identity", None, factor=self.gate_multiplier)
        gated = program.gated_mul(gate_up, self.form, "gated")
        return self.down_proj.record(program, gated, "delta")


class FalconH1DecoderLayer(nn.Module):
    """Attention and a recurrence of the same input, then an MLP, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        self.args = args
        self.mamba = Mamba2Mixer(args.mixer, config=config, prefix=f"{prefix}.mamba")
        self.self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            # Keys are multiplied before they are cached in the original; scores are the same.
            scale=args.head_dim**-0.5 * args.key_multiplier,
            bias=args.attention_bias,
        )
        self.feed_forward = FalconH1MLP(args)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        args = self.args
        inner = self.input_layernorm(x)
        mixed = self.mamba(inner * args.ssm_in_multiplier)
        mixed = mixed.mul_(args.ssm_out_multiplier)
        attended = self.self_attn(inner.mul_(args.attention_in_multiplier), rotation)
        mixed += attended.mul_(args.attention_out_multiplier)
        x = mixed.add_(x)
        return self.feed_forward(self.pre_ff_layernorm(x)).add_(x)

    def record(self, program: Program, rotation: NativeRotation) -> None:
        """As `forward` of the stream, in a program."""
        args = self.args
        norm = norm_weights(self.input_layernorm)
        x = program.normed(norm._replace(weight=norm.weight * args.ssm_in_multiplier))
        mixed = record(self.mamba, program, x)
        x = program.normed(norm._replace(weight=norm.weight * args.attention_in_multiplier))
        attended = record(self.self_attn, program, x, rotation)
        program.add(mixed, scale=args.ssm_out_multiplier)
        program.add(attended, scale=args.attention_out_multiplier)
        x = program.normed(norm_weights(self.pre_ff_layernorm))
        out = record(self.feed_forward, program, x)
        program.add(out, scale=self.feed_forward.down_multiplier)


class FalconH1ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                FalconH1DecoderLayer(args, config, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
            embed_scale=args.embedding_multiplier,
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(
            model,
            LMHead(args.vocab_size, args.hidden_size, tied_to, scale=args.lm_head_multiplier),
        )

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        return super().sanitize(name.replace("final_layernorm.", "norm."))
