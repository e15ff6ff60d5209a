"""Qwen3-Next (Qwen Team 2025): gated delta nets, and attention with a gate in every fourth layer.

Attention normalises query and key heads, turns a part of each and multiplies what it finds by a
sigmoid gate. The MLP of most layers is a router with many small experts and one that every token
asks, gated too. Norms store the difference of their weights from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.kernels.cpu.recording import (
    ExpertChoice,
    NativeRotation,
    Program,
    RecordingError,
    Rows,
    record,
    require_kind,
)
from jubako.layers.attention import Attention
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetArgs
from jubako.layers.grouped_linear import GroupedLinear, Mixed
from jubako.layers.linear import RowParallelLinear
from jubako.layers.mlp import GatedMLP
from jubako.layers.moe import Experts, Router, softmax_top_k
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import QKNormRope, RopeParameters, RotaryEmbedding, Rotation
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, norm_weights
from jubako.models.hf_config import FULL, experts_per_token, kv_heads, rope_parameters, value

LINEAR = "linear_attention"


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    layer_types: list[str]
    moe_layers: list[bool]
    mixer: GatedDeltaNetArgs
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Qwen3-Next model."""
        hidden_size = value(c, "hidden_size", 2048)
        heads = value(c, "num_attention_heads", 16)
        num_layers = value(c, "num_hidden_layers", 48)
        num_experts = value(c, "num_experts", 512)
        eps = value(c, "rms_norm_eps", 1e-6)
        return cls(
            vocab_size=value(c, "vocab_size", 151_936),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 5632),
            moe_intermediate_size=value(c, "moe_intermediate_size", 512),
            shared_expert_intermediate_size=value(c, "shared_expert_intermediate_size", 512),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 2),
            head_dim=value(c, "head_dim", 256),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=eps,
            attention_bias=value(c, "attention_bias", False),
            num_experts=num_experts,
            num_experts_per_tok=experts_per_token(c, 10, num_experts),
            norm_topk_prob=value(c, "norm_topk_prob", True),
            layer_types=_layer_types(c, num_layers),
            moe_layers=_moe_layers(c, num_layers),
            mixer=_mixer(c, hidden_size, eps),
            rope=rope_parameters(
                {"partial_rotary_factor": 0.25, **c}, value(c, "max_position_embeddings", 32_768)
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _layer_types(c: Mapping[str, Any], num_layers: int) -> list[str]:
    """Of each layer; without a list every `full_attention_interval`-th has attention."""
    types = c.get("layer_types")
    if types is None:
        interval = value(c, "full_attention_interval", 4)
        return [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if not isinstance(types, list) or not all(kind in (LINEAR, FULL) for kind in types):
        raise UnsupportedModelError(
            f"layer_types in config.json must be a list of {LINEAR} and {FULL}, got {types!r:.100}."
        )
    if len(types) != num_layers:
        raise UnsupportedModelError(
            f"config.json names {len(types)} layer_types for {num_layers} layers."
        )
    return types


def _moe_layers(c: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Every `decoder_sparse_step`-th layer has experts, unless it is among `mlp_only_layers`."""
    step = value(c, "decoder_sparse_step", 1)
    dense = c.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError("mlp_only_layers in config.json must be a list of layer numbers.")
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def _mixer(c: Mapping[str, Any], hidden_size: int, eps: float) -> GatedDeltaNetArgs:
    key_heads = value(c, "linear_num_key_heads", 16)
    value_heads = value(c, "linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise UnsupportedModelError(
            f"linear_num_value_heads={value_heads} in config.json cannot be divided among "
            f"linear_num_key_heads={key_heads}."
        )
    activation = value(c, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"hidden_act={activation!r} in config.json is not supported for {LINEAR} layers; "
            "known is silu."
        )
    return GatedDeltaNetArgs(
        hidden_size=hidden_size,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=value(c, "linear_key_head_dim", 128),
        value_head_dim=value(c, "linear_value_head_dim", 128),
        conv_kernel=value(c, "linear_conv_kernel_dim", 4, least=2),
        norm_eps=eps,
    )


class Qwen3NextAttention(nn.Module):
    """Attention of one layer, and the gate on what it finds."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, head_dim = (
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
        )
        self.qkv_proj = GroupedLinear(
            args.hidden_size,
            {
                "q_proj": Mixed(heads, {"q": head_dim, "gate": head_dim}),
                "k_proj": Mixed(kv_heads, {"k": head_dim}),
                "v_proj": Mixed(kv_heads, {"v": head_dim}),
            },
            ("q", "k", "v", "gate"),
            args.attention_bias,
        )
        self.qk_norm_rope = QKNormRope(heads, kv_heads, head_dim, args.rms_norm_eps, 1.0)
        self.attn = Attention(
            heads,
            head_dim,
            head_dim**-0.5,
            kv_heads,
            config=config,
            layer_name=f"{prefix}.attn",
        )
        self.o_proj = RowParallelLinear(heads * head_dim, args.hidden_size, args.attention_bias)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        heads, kv_heads = self.attn.num_heads, self.attn.num_kv_heads
        projected = self.qkv_proj(x).unflatten(1, (-1, self.attn.head_size))
        qk, v, gate = projected.split((heads + kv_heads, kv_heads, heads), dim=1)
        q, k = self.qk_norm_rope(qk, rotation).split((heads, kv_heads), dim=1)
        return self.o_proj(self.attn(q, k, v).mul_(gate.sigmoid().flatten(1)))

    def record(
        self, program: Program, x: Rows, rotation: NativeRotation, *, to_stream: bool = False
    ) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        shape = require_kind(self.attn, Attention).shape
        projected = self.qkv_proj.record(program, x, "qkv")
        attended = self.qk_norm_rope.record(program, projected, shape, rotation)
        gate = projected.columns(projected.width - attended.width, attended.width)
        program.gate(attended, gate, "sigmoid", None)
        return self.o_proj.record(program, attended, "delta", to_stream=to_stream)


class Qwen3NextMoE(nn.Module):
    """Router and experts of one layer, and the expert that every token asks."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.renormalize = args.norm_topk_prob
        self.gate = Router(args.hidden_size, args.num_experts)
        self.experts = Experts(
            args.num_experts, args.hidden_size, args.moe_intermediate_size, args.hidden_act
        )
        self.shared_expert = GatedMLP(
            args.hidden_size, args.shared_expert_intermediate_size, args.hidden_act
        )
        self.shared_expert_gate = RowParallelLinear(args.hidden_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        routed = self.experts(x, *softmax_top_k(self.gate(x), self.top_k, self.renormalize))
        shared = self.shared_expert(x)
        return routed.addcmul_(shared, self.shared_expert_gate(x).sigmoid())

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program, added to the residual stream."""
        if not to_stream:
            raise RecordingError("gated experts that are not added to the stream")
        logits = self.gate.record(program, x, "router")
        routing = ExpertChoice(self.top_k, "softmax", normalise=self.renormalize)
        self.experts.record(program, x, logits, routing, to_stream=True)
        gate = self.shared_expert_gate.record(program, x, "gate")
        shared = self.shared_expert.record(program, x)
        return program.gate(shared, gate, "sigmoid", None, to_stream=True)


class Qwen3NextDecoderLayer(nn.Module):
    """Attention or a recurrence, and an MLP or experts, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        self.self_attn: nn.Module | None = None
        self.linear_attn: nn.Module | None = None
        if args.layer_types[layer] == FULL:
            self.self_attn = Qwen3NextAttention(args, config, f"{prefix}.self_attn")
        else:
            self.linear_attn = GatedDeltaNet(
                args.mixer, config=config, prefix=f"{prefix}.linear_attn"
            )
        self.mlp = (
            Qwen3NextMoE(args)
            if args.moe_layers[layer]
            else GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        )
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, 1.0)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, 1.0)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        inner = self.input_layernorm(x)
        if self.self_attn is not None:
            mixed = self.self_attn(inner, rotation)
        else:
            assert self.linear_attn is not None
            mixed = self.linear_attn(inner)
        x = mixed.add_(x)
        return self.mlp(self.post_attention_layernorm(x)).add_(x)

    def record(self, program: Program, rotation: NativeRotation | None) -> None:
        """As `forward` of the stream, in a program."""
        x = program.normed(norm_weights(self.input_layernorm))
        if self.self_attn is not None:
            record(self.self_attn, program, x, rotation, to_stream=True)
        else:
            record(self.linear_attn, program, x, to_stream=True)
        x = program.normed(norm_weights(self.post_attention_layernorm))
        record(self.mlp, program, x, to_stream=True)


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                Qwen3NextDecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps, 1.0),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted.

        The layers named `mtp.` guess tokens ahead; the model answers without them.
        """
        return None if name.startswith("mtp.") else super().sanitize(name)
