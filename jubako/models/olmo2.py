"""OLMo 2 and OLMo 3 (OLMo Team 2025, arXiv 2501.00656 and 2512.13961).

Norms come after attention and MLP, and one covers all query heads together, another all key heads.
In OLMo 3 three of four layers see a window, and only the others scale their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import NativeRotation, Program, Rows, record
from jubako.layers.attention import Attention
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.linear import QKVParallelLinear, RowParallelLinear
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import QKRope, RopeParameters, RotaryEmbedding, Rotation
from jubako.models.decoder import DecoderForCausalLM, DecoderModel
from jubako.models.hf_config import (
    FULL,
    SLIDING,
    kv_heads,
    layer_types,
    make_rope_parameters,
    mapping,
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
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    sliding_window: int | None
    layer_types: list[str]
    rope: dict[str, RopeParameters]
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any], architecture: str) -> ModelArgs:
        """Of an OLMo 2, or with architecture `Olmo3ForCausalLM` of an OLMo 3 model."""
        olmo3 = architecture == "Olmo3ForCausalLM"
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        num_layers = value(c, "num_hidden_layers", 32)
        types = [FULL] * num_layers
        if olmo3:
            pattern = [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(num_layers)]
            types = layer_types(c, num_layers, pattern)
        length = value(c, "max_position_embeddings", 2048)
        return cls(
            vocab_size=value(c, "vocab_size", 50_304),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 11_008),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, heads),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-5),
            attention_bias=value(c, "attention_bias", False),
            sliding_window=value(c, "sliding_window", 4096) if olmo3 else None,
            layer_types=types,
            rope=_olmo3_rope(c, length) if olmo3 else {FULL: rope_parameters(c, length)},
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _olmo3_rope(c: Mapping[str, Any], length: int) -> dict[str, RopeParameters]:
    """Scaling concerns the layers that see everything."""
    entries = mapping(c, "rope_parameters")
    if entries and not any(isinstance(entries.get(kind), Mapping) for kind in (FULL, SLIDING)):
        entries = {FULL: entries}
    full = {**mapping(entries, FULL), **mapping(c, "rope_scaling")}
    theta = value(c, "rope_theta", 500_000.0)
    return {
        FULL: make_rope_parameters(full, theta, length),
        SLIDING: make_rope_parameters(mapping(entries, SLIDING), theta, length),
    }


class Olmo2Attention(nn.Module):
    """Attention of one layer."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        heads, num_kv_heads, head_dim = (
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
        )
        self.qkv_proj = QKVParallelLinear(
            args.hidden_size, head_dim, heads, num_kv_heads, args.attention_bias
        )
        self.q_norm = RMSNorm(heads * head_dim, args.rms_norm_eps)
        self.k_norm = RMSNorm(num_kv_heads * head_dim, args.rms_norm_eps)
        self.qk_rope = QKRope()
        self.attn = Attention(
            heads,
            head_dim,
            head_dim**-0.5,
            num_kv_heads,
            config=config,
            layer_name=f"{prefix}.attn",
            sliding_window=args.sliding_window if args.layer_types[layer] == SLIDING else None,
        )
        self.o_proj = RowParallelLinear(heads * head_dim, args.hidden_size, args.attention_bias)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        qk, v = self.qkv_proj(x)
        q, k = qk.split((self.attn.num_heads, self.attn.num_kv_heads), dim=1)
        q = self.qk_rope(self.q_norm(q.flatten(1)).view(q.shape), rotation)
        k = self.qk_rope(self.k_norm(k.flatten(1)).view(k.shape), rotation)
        return self.o_proj(self.attn(q, k, v))

    def record(self, program: Program, x: Rows, rotation: NativeRotation) -> Rows:
        """As `forward`, in a program."""
        qkv = self.qkv_proj.record(program, x, "qkv")
        program.normalise(qkv, 0, self.q_norm.weights)
        program.normalise(qkv, self.q_norm.weight.shape[0], self.k_norm.weights)
        attended = self.qk_rope.record(program, qkv, self.attn.shape, rotation)
        return self.o_proj.record(program, attended, "delta")


class Olmo2DecoderLayer(nn.Module):
    """Attention and MLP, each before a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(args, config, layer, f"{prefix}.self_attn")
        self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        x = self.post_attention_layernorm(self.self_attn(x, rotation)).add_(x)
        return self.post_feedforward_layernorm(self.mlp(x)).add_(x)

    def record(self, program: Program, rotation: NativeRotation) -> None:
        """As `forward` of the stream, in a program."""
        attended = record(self.self_attn, program, program.raw(), rotation)
        program.add(attended, self.post_attention_layernorm.weights)
        out = record(self.mlp, program, program.raw())
        program.add(out, self.post_feedforward_layernorm.weights)


class Olmo2ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(
            config.model_config.hf_config, config.model_config.architecture
        )
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        length = config.model_config.context_length
        model = DecoderModel(
            embed_tokens,
            [
                Olmo2DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            {
                kind: RotaryEmbedding(args.head_dim, args.rope[kind], length)
                for kind in dict.fromkeys(args.layer_types)
            },
            args.layer_types,
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
