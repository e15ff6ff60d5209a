"""gpt-oss (OpenAI 2025, arXiv 2508.10925).

Layers with a sliding window and layers that see everything take turns; each head has a sink, a
learned addition to its softmax's denominator. All MLPs are mixtures of experts with clamped SwiGLU
and biases.
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
from jubako.layers.moe import CLAMPED_SWIGLU, Experts, Router, top_k_softmax
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import (
    FULL,
    SLIDING,
    experts_per_token,
    kv_heads,
    layer_types,
    mapping,
    rope_parameters,
    value,
)

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


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
    rms_norm_eps: float
    attention_bias: bool
    sliding_window: int
    layer_types: list[str]
    num_local_experts: int
    num_experts_per_tok: int
    swiglu_limit: float
    swiglu_alpha: float
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a gpt-oss model."""
        num_layers = value(c, "num_hidden_layers", 36)
        heads = value(c, "num_attention_heads", 64)
        num_experts = value(c, "num_local_experts", 128)
        if not mapping(c, "rope_parameters") and not mapping(c, "rope_scaling"):
            c = {**c, "rope_parameters": _DEFAULT_ROPE}
        return cls(
            vocab_size=value(c, "vocab_size", 201_088),
            hidden_size=value(c, "hidden_size", 2880),
            intermediate_size=value(c, "intermediate_size", 2880),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            head_dim=value(c, "head_dim", 64),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-5),
            attention_bias=value(c, "attention_bias", True),
            sliding_window=value(c, "sliding_window", 128),
            layer_types=layer_types(
                c, num_layers, [FULL if i % 2 else SLIDING for i in range(num_layers)]
            ),
            num_local_experts=num_experts,
            num_experts_per_tok=experts_per_token(c, 4, num_experts),
            swiglu_limit=value(c, "swiglu_limit", 7.0),
            swiglu_alpha=value(c, "swiglu_alpha", 1.702),
            rope=rope_parameters(
                c, value(c, "max_position_embeddings", 131_072), default_theta=150_000.0
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class GptOssMLP(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.router = Router(args.hidden_size, args.num_local_experts, bias=True)
        self.experts = Experts(
            args.num_local_experts,
            args.hidden_size,
            args.intermediate_size,
            CLAMPED_SWIGLU,
            transposed=True,
            interleaved=True,
            bias=True,
            limit=args.swiglu_limit,
            alpha=args.swiglu_alpha,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        return self.experts(x, *top_k_softmax(self.router(x), self.top_k))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        logits = self.router.record(program, x, "router")
        routing = ExpertChoice(self.top_k, "softmax of chosen")
        return self.experts.record(program, x, logits, routing, to_stream=to_stream)


class GptOssDecoderLayer(PreNormLayer):
    """Attention and experts, each after a norm."""

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
            sink_logits=True,
        )
        mlp = GptOssMLP(args)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class GptOssForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                GptOssDecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
