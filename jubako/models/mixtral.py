"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with a mixture of experts in each layer.

A router chooses some of the experts for each token; their answers are weighted by the softmax of
the chosen ones' logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import ExpertChoice, Program, Rows
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.moe import Experts, Router, softmax_top_k
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import experts_per_token, kv_heads, rope_parameters, value

_EXPERT_PARTS = ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))


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
    num_local_experts: int
    num_experts_per_tok: int
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Mixtral model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        num_experts = value(c, "num_local_experts", 8)
        has_window = c.get("sliding_window") is not None
        return cls(
            vocab_size=value(c, "vocab_size", 32_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 14_336),
            num_hidden_layers=value(c, "num_hidden_layers", 32),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-5),
            sliding_window=value(c, "sliding_window", 4096) if has_window else None,
            num_local_experts=num_experts,
            num_experts_per_tok=experts_per_token(c, 2, num_experts),
            rope=rope_parameters(
                c, value(c, "max_position_embeddings", 131_072), default_theta=1_000_000.0
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class MixtralMoE(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.gate = Router(args.hidden_size, args.num_local_experts)
        self.experts = Experts(
            args.num_local_experts, args.hidden_size, args.intermediate_size, args.hidden_act
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        return self.experts(x, *softmax_top_k(self.gate(x), self.top_k, renormalize=True))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        logits = self.gate.record(program, x, "router")
        routing = ExpertChoice(self.top_k, "softmax", normalise=True)
        return self.experts.record(program, x, logits, routing, to_stream=to_stream)


class MixtralDecoderLayer(PreNormLayer):
    """Attention and experts, each after a norm."""

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
        mlp = MixtralMoE(args)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class MixtralForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                MixtralDecoderLayer(args, config, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """As the base; checkpoints on the hub have Mixtral's own names for experts."""
        if ".block_sparse_moe." in name:
            name = name.replace(".block_sparse_moe.", ".mlp.")
            for own_name, part in _EXPERT_PARTS:
                name = name.replace(own_name, part)
        return super().sanitize(name)
