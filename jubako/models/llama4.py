"""Llama 4, text (Meta AI 2025).

Three layers of four rotate and see only their own chunk of positions; the fourth sees everything
without rotation, its queries growing with the logarithm of their position. Some layers have a dense
MLP, the others a shared expert and routed ones, whose input is weighted by a sigmoid.
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
from jubako.kernels.registry import get_kernels
from jubako.layers.attention import Attention
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.linear import QKVParallelLinear, RowParallelLinear
from jubako.layers.mlp import GatedMLP
from jubako.layers.moe import Experts, Router, top_k_sigmoid
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding, Rotation
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, norm_weights
from jubako.models.hf_config import (
    FULL,
    experts_per_token,
    kv_heads,
    mapping,
    rope_parameters,
    value,
)

CHUNKED = "chunked_attention"
ROTATED = "rotated"
UNROTATED = "unrotated"


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    intermediate_size_mlp: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    use_qk_norm: bool
    attention_chunk_size: int
    chunked: list[bool]
    rotated: list[bool]
    moe: list[bool]
    num_local_experts: int
    num_experts_per_tok: int
    attn_temperature_tuning: bool
    floor_scale: float
    attn_scale: float
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> ModelArgs:
        """Of a text model, or of the text part of a multimodal one."""
        tied = value(hf_config, "tie_word_embeddings", False)
        c = mapping(hf_config, "text_config") or hf_config
        num_layers = value(c, "num_hidden_layers", 48)
        hidden_size = value(c, "hidden_size", 5120)
        heads = value(c, "num_attention_heads", 40)
        num_experts = value(c, "num_local_experts", 16)
        rotated = _rotated_layers(c, num_layers)
        return cls(
            vocab_size=value(c, "vocab_size", 202_048),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 8192),
            intermediate_size_mlp=value(c, "intermediate_size_mlp", 16_384),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            head_dim=value(c, "head_dim", 128),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-5),
            attention_bias=value(c, "attention_bias", False),
            use_qk_norm=value(c, "use_qk_norm", True),
            attention_chunk_size=value(c, "attention_chunk_size", 8192),
            chunked=_chunked_layers(c, num_layers, rotated),
            rotated=rotated,
            moe=_moe_layers(c, num_layers),
            num_local_experts=num_experts,
            num_experts_per_tok=experts_per_token(c, 1, num_experts),
            # Some checkpoints have a number here.
            attn_temperature_tuning=bool(c.get("attn_temperature_tuning", True)),
            floor_scale=float(value(c, "floor_scale", 8192)),
            attn_scale=float(value(c, "attn_scale", 0.1)),
            rope=rope_parameters(
                c, value(c, "max_position_embeddings", 131_072), default_theta=500_000.0
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", tied),
        )


def _rotated_layers(c: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers rotate: in spite of its name, `no_rope_layers` has a 1 for them."""
    interval = value(c, "no_rope_layer_interval", 4)
    # An empty list is none, as checkpoints have it.
    entries = c.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(entries, list) or len(entries) != num_layers:
        raise CheckpointError(
            f"no_rope_layers in config.json must be a list with a 0 or a 1 for each of the "
            f"{num_layers} layers."
        )
    return [bool(entry) for entry in entries]


def _chunked_layers(c: Mapping[str, Any], num_layers: int, rotated: list[bool]) -> list[bool]:
    """Which layers see only their own chunk; where nothing is said, those that rotate."""
    types = c.get("layer_types")
    if types is None:
        return rotated
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(
            f"layer_types in config.json must be a list with a type for each of the {num_layers} "
            "layers."
        )
    for kind in types:
        if kind not in (CHUNKED, FULL):
            raise UnsupportedModelError(
                f"The model's layer type {kind!r} is not supported; known are {CHUNKED} and {FULL}."
            )
    return [kind == CHUNKED for kind in types]


def _moe_layers(c: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have experts: those named, else every `interleave_moe_layer_step`-th."""
    named = c.get("moe_layers")
    if named is None:
        step = value(c, "interleave_moe_layer_step", 1)
        return [(i + 1) % step == 0 for i in range(num_layers)]
    if not isinstance(named, list) or not all(type(i) is int for i in named):
        raise CheckpointError("moe_layers in config.json must be a list of layer numbers.")
    return [i in named for i in range(num_layers)]


class QueryScale(nn.Module):
    """What multiplies queries that are not rotated, so that attention stays sharp far along."""

    def __init__(self, floor_scale: float, attn_scale: float) -> None:
        super().__init__()
        self.floor_scale = floor_scale
        self.attn_scale = attn_scale

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [T] → factors [T, 1, 1] float32: `1 + scale · log(1 + ⌊(p + 1) / floor⌋)`."""
        steps = ((positions.float() + 1) / self.floor_scale).floor_()
        return steps.log1p_().mul_(self.attn_scale).add_(1)[:, None, None]

    def record(self, program: Program) -> Rows:
        """As `forward` of the step's positions, in a program."""
        return program.position_scale(self.attn_scale, 1.0, self.floor_scale)


class Llama4Attention(nn.Module):
    """Attention of one layer."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, head_dim = (
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
        )
        self.rotated = args.rotated[layer]
        self.eps = args.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(
            args.hidden_size, head_dim, heads, kv_heads, args.attention_bias
        )
        # The norm has no weights of its own. It comes after the rotation, which changes no length.
        ones = torch.ones(heads + kv_heads, head_dim, dtype=torch.float32)
        self.register_buffer("norm_weight", ones if args.use_qk_norm else None, persistent=False)
        self.norm_weight: torch.Tensor | None
        self.attn = Attention(
            heads,
            head_dim,
            head_dim**-0.5,
            kv_heads,
            config=config,
            layer_name=f"{prefix}.attn",
            attention_chunk_size=args.attention_chunk_size if args.chunked[layer] else None,
        )
        self.o_proj = RowParallelLinear(heads * head_dim, args.hidden_size, args.attention_bias)
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor, place: Rotation | torch.Tensor | None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]; `place` is the layer's rotation or query scale."""
        qk, v = self.qkv_proj(x)
        if self.rotated:
            assert isinstance(place, Rotation)
            qk = self.kernels.qk_norm_rope(
                qk, place.cos, place.sin, self.norm_weight, self.eps, interleaved=True
            )
        q, k = qk.split((self.attn.num_heads, self.attn.num_kv_heads), dim=1)
        if isinstance(place, torch.Tensor):
            q = (q * place).to(x.dtype)
        return self.o_proj(self.attn(q, k, v))

    def record(
        self,
        program: Program,
        x: Rows,
        place: NativeRotation | Rows | None,
        *,
        to_stream: bool = False,
    ) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        qkv = self.qkv_proj.record(program, x, "qkv")
        shape = require_kind(self.attn, Attention).shape
        if self.rotated:
            assert isinstance(place, NativeRotation)
            attended = program.attention(
                qkv, shape, place, self.norm_weight, self.eps, interleaved=True
            )
        else:
            assert not isinstance(place, NativeRotation)
            attended = program.attention(qkv, shape, None, query_scale=place)
        return self.o_proj.record(program, attended, "delta", to_stream=to_stream)


class Llama4MoE(nn.Module):
    """Router, routed experts and the shared one of a layer."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.router = Router(args.hidden_size, args.num_local_experts)
        self.experts = Experts(
            args.num_local_experts,
            args.hidden_size,
            args.intermediate_size,
            args.hidden_act,
            transposed=True,
            weigh_input=True,
        )
        self.shared_expert = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        routed = self.experts(x, *top_k_sigmoid(self.router(x), self.top_k))
        return self.shared_expert(x).add_(routed)

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program, added to the residual stream."""
        if not to_stream:
            raise RecordingError("experts beside others that are not added to the stream")
        logits = self.router.record(program, x, "router")
        routing = ExpertChoice(self.top_k, "sigmoid of chosen")
        self.experts.record(program, x, logits, routing, to_stream=True)
        return self.shared_expert.record(program, x, to_stream=True)


class Llama4DecoderLayer(nn.Module):
    """Attention and MLP or experts, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        self.self_attn = Llama4Attention(args, config, layer, f"{prefix}.self_attn")
        self.feed_forward = (
            Llama4MoE(args)
            if args.moe[layer]
            else GatedMLP(args.hidden_size, args.intermediate_size_mlp, args.hidden_act)
        )
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, x: torch.Tensor, place: Rotation | torch.Tensor | None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        x = self.self_attn(self.input_layernorm(x), place).add_(x)
        return self.feed_forward(self.post_attention_layernorm(x)).add_(x)

    def record(self, program: Program, place: NativeRotation | Rows | None) -> None:
        """As `forward` of the stream, in a program."""
        x = program.normed(norm_weights(self.input_layernorm))
        record(self.self_attn, program, x, place, to_stream=True)
        x = program.normed(norm_weights(self.post_attention_layernorm))
        record(self.feed_forward, program, x, to_stream=True)


class Llama4ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        length = config.model_config.context_length
        places: dict[str, nn.Module] = {ROTATED: RotaryEmbedding(args.head_dim, args.rope, length)}
        if args.attn_temperature_tuning:
            places[UNROTATED] = QueryScale(args.floor_scale, args.attn_scale)
        model = DecoderModel(
            embed_tokens,
            [
                Llama4DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            places,
            [ROTATED if rotated else UNROTATED for rotated in args.rotated],
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """The text part's name of a tensor; None for the image part and a tied head."""
        if "vision_model." in name or "multi_modal_projector." in name:
            return None
        if name.startswith("model.language_model."):
            name = "model." + name.removeprefix("model.language_model.")
        return super().sanitize(name.removeprefix("language_model."))
