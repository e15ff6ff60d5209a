"""Granite 4 (IBM 2025): Mamba 2 layers, and a few of attention between them, with multipliers.

Every layer is followed by an MLP that all tokens share, and in the larger models by experts beside
it. Attention may go without positions.
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
from jubako.layers.mamba2 import Mamba2Args, Mamba2Mixer
from jubako.layers.mlp import GatedMLP
from jubako.layers.moe import Experts, Router, top_k_softmax
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding, Rotation
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, norm_weights
from jubako.models.hf_config import experts_per_token, kv_heads, rope_parameters, value
from jubako.models.mamba_config import ATTENTION, MAMBA, layer_kinds, mamba2_args

_OWN_NAMES = {
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".shared_mlp.input_linear.": ".shared_mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
}


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of an expert."""
    shared_intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    kinds: list[str]
    mixer: Mamba2Args
    num_local_experts: int
    num_experts_per_tok: int
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Logits are divided by it."""
    rope: RopeParameters | None
    """None: attention knows no positions."""
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Granite 4 model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        eps = value(c, "rms_norm_eps", 1e-6)
        num_layers = value(c, "num_hidden_layers", 32)
        experts = value(c, "num_local_experts", 8, least=0)
        names = c.get("layer_types")
        if names is None:
            names = [MAMBA] * num_layers
        kinds = layer_kinds(names, num_layers, "layer_types")
        if set(kinds) - {MAMBA, ATTENTION}:
            raise UnsupportedModelError("layer_types of this model are mamba and attention only.")
        return cls(
            vocab_size=value(c, "vocab_size", 32_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 11_008),
            shared_intermediate_size=value(c, "shared_intermediate_size", 1024),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=eps,
            attention_bias=value(c, "attention_bias", False),
            kinds=kinds,
            mixer=mamba2_args(c, hidden_size, eps, default_state=256),
            num_local_experts=experts,
            num_experts_per_tok=experts_per_token(c, 2, experts) if experts else 0,
            embedding_multiplier=value(c, "embedding_multiplier", 1.0),
            attention_multiplier=value(c, "attention_multiplier", 1.0),
            residual_multiplier=value(c, "residual_multiplier", 1.0),
            logits_scaling=value(c, "logits_scaling", 1.0),
            rope=_rope(c),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _rope(c: Mapping[str, Any]) -> RopeParameters | None:
    kind = value(c, "position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise UnsupportedModelError(
            f"position_embedding_type={kind!r} in config.json is not supported; known are rope "
            "and nope."
        )
    longest = value(c, "max_position_embeddings", 2048)
    return rope_parameters(c, longest) if kind == "rope" else None


class GraniteExperts(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.router = Router(args.hidden_size, args.num_local_experts)
        self.experts = Experts(
            args.num_local_experts, args.hidden_size, args.intermediate_size, args.hidden_act
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        out: torch.Tensor = self.experts(x, *top_k_softmax(self.router(x), self.top_k))
        return out

    def record(self, program: Program, x: Rows, role: str) -> Rows:
        """As `forward`, in a program, into the buffer for `role`."""
        logits = self.router.record(program, x, "router")
        routing = ExpertChoice(self.top_k, "softmax of chosen")
        return self.experts.record(program, x, logits, routing, role)


class GraniteHybridDecoderLayer(nn.Module):
    """Attention or a recurrence, then MLP and experts, each after a norm; multiples are added."""

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
                scale=args.attention_multiplier,
                bias=args.attention_bias,
            )
        else:
            self.mamba = Mamba2Mixer(args.mixer, config=config, prefix=f"{prefix}.mamba")
        self.block_sparse_moe = GraniteExperts(args) if args.num_local_experts else None
        self.shared_mlp = GatedMLP(args.hidden_size, args.shared_intermediate_size, args.hidden_act)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.residual_multiplier = args.residual_multiplier

    def forward(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        inner = self.input_layernorm(x)
        if self.self_attn is not None:
            mixed = self.self_attn(inner, rotation)
        else:
            assert self.mamba is not None
            mixed = self.mamba(inner)
        x = x.add(mixed, alpha=self.residual_multiplier)
        inner = self.post_attention_layernorm(x)
        out: torch.Tensor = self.shared_mlp(inner)
        if self.block_sparse_moe is not None:
            out += self.block_sparse_moe(inner)
        return x.add(out, alpha=self.residual_multiplier)

    def record(self, program: Program, rotation: NativeRotation | None) -> None:
        """As `forward` of the stream, in a program."""
        x = program.normed(norm_weights(self.input_layernorm))
        if self.self_attn is not None:
            mixed = record(self.self_attn, program, x, rotation)
        else:
            mixed = record(self.mamba, program, x)
        program.add(mixed, scale=self.residual_multiplier)
        x = program.normed(norm_weights(self.post_attention_layernorm))
        answers = None
        if self.block_sparse_moe is not None:
            answers = record(self.block_sparse_moe, program, x, "answers")
        program.add(record(self.shared_mlp, program, x), scale=self.residual_multiplier)
        if answers is not None:
            program.add(answers, scale=self.residual_multiplier)


class GraniteMoeHybridForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        rotary: RotaryEmbedding | dict[str, RotaryEmbedding] = {}
        if args.rope is not None:
            head_dim = args.hidden_size // args.num_attention_heads
            rotary = RotaryEmbedding(head_dim, args.rope, config.model_config.context_length)
        model = DecoderModel(
            embed_tokens,
            [
                GraniteHybridDecoderLayer(args, kind, config, f"{prefix}model.layers.{i}")
                for i, kind in enumerate(args.kinds)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            rotary,
            embed_scale=args.embedding_multiplier,
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(
            model,
            LMHead(args.vocab_size, args.hidden_size, tied_to, scale=1 / args.logits_scaling),
        )

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        for old, new in _OWN_NAMES.items():
            name = name.replace(old, new)
        return super().sanitize(name)
