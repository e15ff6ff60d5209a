"""Qwen3 with a mixture of experts (Qwen Team 2025, arXiv 2505.09388).

Qwen3's attention; the MLP of most layers is a router and many small experts, whose weights are the
softmax over all experts, made to sum to 1 or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import CheckpointError
from jubako.kernels.cpu.recording import ExpertChoice, Program, Rows
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import GatedMLP
from jubako.layers.moe import Experts, Router, softmax_top_k
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import experts_per_token, kv_heads, rope_parameters, value


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    sliding_window: int | None
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_layers: list[bool]
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Qwen3 MoE model."""
        hidden_size = value(c, "hidden_size", 2048)
        heads = value(c, "num_attention_heads", 32)
        num_layers = value(c, "num_hidden_layers", 24)
        # Checkpoints call them num_experts, transformers 5 writes num_local_experts.
        num_experts = value(c, "num_experts", value(c, "num_local_experts", 128))
        return cls(
            vocab_size=value(c, "vocab_size", 151_936),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 6144),
            moe_intermediate_size=value(c, "moe_intermediate_size", 768),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 4),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6),
            attention_bias=value(c, "attention_bias", False),
            sliding_window=value(c, "sliding_window", 4096)
            if c.get("use_sliding_window")
            else None,
            num_experts=num_experts,
            num_experts_per_tok=experts_per_token(c, 8, num_experts),
            norm_topk_prob=value(c, "norm_topk_prob", False),
            moe_layers=_moe_layers(c, num_layers),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 32_768)),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _moe_layers(c: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Every `decoder_sparse_step`-th layer has experts, unless it is among `mlp_only_layers`."""
    step = value(c, "decoder_sparse_step", 1)
    dense = c.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError("mlp_only_layers in config.json must be a list of layer numbers.")
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


class Qwen3MoeMLP(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.renormalize = args.norm_topk_prob
        self.gate = Router(args.hidden_size, args.num_experts)
        self.experts = Experts(
            args.num_experts, args.hidden_size, args.moe_intermediate_size, args.hidden_act
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        return self.experts(x, *softmax_top_k(self.gate(x), self.top_k, self.renormalize))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        logits = self.gate.record(program, x, "router")
        routing = ExpertChoice(self.top_k, "softmax", normalise=self.renormalize)
        return self.experts.record(program, x, logits, routing, to_stream=to_stream)


class Qwen3MoeDecoderLayer(PreNormLayer):
    """Attention and MLP or experts, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            bias=args.attention_bias,
            qk_norm_eps=args.rms_norm_eps,
            sliding_window=args.sliding_window,
        )
        mlp = (
            Qwen3MoeMLP(args)
            if args.moe_layers[layer]
            else GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        )
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                Qwen3MoeDecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
