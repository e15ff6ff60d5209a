"""Jamba (AI21 2024, arXiv 2403.19887): Mamba layers, and a few of attention between them.

Attention uses no positions. Every second layer's MLP is a router and experts, whose weights are the
softmax over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.kernels.cpu.recording import ExpertChoice, NativeRotation, Program, Rows, record
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mamba1 import Mamba1Args, Mamba1Mixer
from jubako.layers.mlp import GatedMLP
from jubako.layers.moe import Experts, Router, softmax_top_k
from jubako.layers.norm import RMSNorm
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, norm_weights
from jubako.models.hf_config import experts_per_token, kv_heads, value
from jubako.models.mamba_config import require_silu


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
    num_experts: int
    num_experts_per_tok: int
    attention_layers: list[bool]
    moe_layers: list[bool]
    mixer: Mamba1Args
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Jamba model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        num_layers = value(c, "num_hidden_layers", 32)
        num_experts = value(c, "num_experts", value(c, "num_local_experts", 16))
        eps = value(c, "rms_norm_eps", 1e-6)
        expert_layers = _every(c, "expert_layer", num_layers, period=2, offset=1)
        return cls(
            vocab_size=value(c, "vocab_size", 65_536),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 14_336),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=eps,
            num_experts=num_experts,
            # One expert is a plain MLP, whatever the number that a token would ask.
            num_experts_per_tok=experts_per_token(c, 2, num_experts) if num_experts > 1 else 1,
            attention_layers=_every(c, "attn_layer", num_layers, period=8, offset=4),
            moe_layers=[here and num_experts > 1 for here in expert_layers],
            mixer=_mixer(c, hidden_size, eps),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _every(
    c: Mapping[str, Any], entry: str, num_layers: int, *, period: int, offset: int
) -> list[bool]:
    """Which layers `entry`'s period and offset choose."""
    period = value(c, f"{entry}_period", period)
    offset = value(c, f"{entry}_offset", offset, least=0)
    if offset >= period:
        raise UnsupportedModelError(
            f"{entry}_offset={offset} in config.json must be below {entry}_period={period}."
        )
    return [i % period == offset for i in range(num_layers)]


def _mixer(c: Mapping[str, Any], hidden_size: int, eps: float) -> Mamba1Args:
    require_silu(c, "hidden_act")
    rank = c.get("mamba_dt_rank")
    if rank in (None, "auto"):
        rank = -(-hidden_size // 16)
    return Mamba1Args(
        hidden_size=hidden_size,
        intermediate_size=value(c, "mamba_expand", 2) * hidden_size,
        state_size=value(c, "mamba_d_state", 16),
        conv_kernel=value(c, "mamba_d_conv", 4, least=2),
        time_step_rank=value({"mamba_dt_rank": rank}, "mamba_dt_rank", 1),
        conv_bias=value(c, "mamba_conv_bias", True),
        proj_bias=value(c, "mamba_proj_bias", False),
        norm_eps=eps,
    )


class JambaMoE(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.router = Router(args.hidden_size, args.num_experts)
        self.experts = Experts(
            args.num_experts, args.hidden_size, args.intermediate_size, args.hidden_act
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        return self.experts(x, *softmax_top_k(self.router(x), self.top_k, renormalize=False))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        logits = self.router.record(program, x, "router")
        routing = ExpertChoice(self.top_k, "softmax")
        return self.experts.record(program, x, logits, routing, to_stream=to_stream)


class JambaDecoderLayer(nn.Module):
    """Attention or a recurrence, and an MLP or experts, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        self.self_attn: nn.Module | None = None
        self.mamba: nn.Module | None = None
        if args.attention_layers[layer]:
            self.self_attn = SelfAttention(
                args.hidden_size,
                args.num_attention_heads,
                args.num_key_value_heads,
                args.hidden_size // args.num_attention_heads,
                config=config,
                prefix=f"{prefix}.self_attn",
            )
        else:
            self.mamba = Mamba1Mixer(args.mixer, config=config, prefix=f"{prefix}.mamba")
        self.feed_forward = (
            JambaMoE(args)
            if args.moe_layers[layer]
            else GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        )
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        del rotation
        inner = self.input_layernorm(x)
        if self.self_attn is not None:
            mixed = self.self_attn(inner)
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


class JambaForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                JambaDecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            {},
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        return super().sanitize(name.replace("final_layernorm.", "norm."))
