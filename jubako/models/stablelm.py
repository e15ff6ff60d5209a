"""StableLM 2 and Zephyr (Bellagente et al. 2024, arXiv 2402.17834), and StableLM 3B.

Layer norms with biases, and a quarter of each head turns. In some, attention and MLP read the same
norm and are added together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.kernels.cpu.recording import NativeRotation, Program, Rows, record
from jubako.layers.attention import Attention
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.linear import QKVParallelLinear, RowParallelLinear
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import LayerNorm
from jubako.layers.rotary import QKRope, RopeParameters, RotaryEmbedding, Rotation
from jubako.models.decoder import DecoderForCausalLM, DecoderModel
from jubako.models.hf_config import kv_heads, rope_parameters, value


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
    layer_norm_eps: float
    use_qkv_bias: bool
    use_parallel_residual: bool
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a StableLM model."""
        if value(c, "qk_layernorm", False):
            raise UnsupportedModelError(
                "qk_layernorm=true in config.json (a norm for each head) is not supported for "
                "StableLM models; it must be false."
            )
        hidden_size = value(c, "hidden_size", 2560)
        heads = value(c, "num_attention_heads", 32)
        head_dim = value(c, "head_dim", hidden_size // heads)
        if head_dim != hidden_size // heads:
            raise UnsupportedModelError(
                f"head_dim={head_dim} in config.json is not supported for StableLM models; it must "
                f"be hidden_size / num_attention_heads, {hidden_size // heads}."
            )
        return cls(
            vocab_size=value(c, "vocab_size", 50_304),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 6912),
            num_hidden_layers=value(c, "num_hidden_layers", 32),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 32),
            head_dim=head_dim,
            hidden_act=value(c, "hidden_act", "silu"),
            layer_norm_eps=value(c, "layer_norm_eps", 1e-5),
            use_qkv_bias=value(c, "use_qkv_bias", False),
            use_parallel_residual=value(c, "use_parallel_residual", False),
            rope=rope_parameters(
                {"partial_rotary_factor": 0.25, **c}, value(c, "max_position_embeddings", 4096)
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class StableLmAttention(nn.Module):
    """Attention of one layer."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        heads, head_dim = args.num_attention_heads, args.head_dim
        self.qkv_proj = QKVParallelLinear(
            args.hidden_size, head_dim, heads, args.num_key_value_heads, args.use_qkv_bias
        )
        self.qk_rope = QKRope()
        self.attn = Attention(
            heads,
            head_dim,
            head_dim**-0.5,
            args.num_key_value_heads,
            config=config,
            layer_name=f"{prefix}.attn",
        )
        self.o_proj = RowParallelLinear(heads * head_dim, args.hidden_size)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        qk, v = self.qkv_proj(x)
        qk = self.qk_rope(qk, rotation)
        q, k = qk.split((self.attn.num_heads, self.attn.num_kv_heads), dim=1)
        return self.o_proj(self.attn(q, k, v))

    def record(self, program: Program, x: Rows, rotation: NativeRotation) -> None:
        """As `forward`, in a program; the result is added to the stream."""
        qkv = self.qkv_proj.record(program, x, "qkv")
        attended = self.qk_rope.record(program, qkv, self.attn.shape, rotation)
        self.o_proj.record(program, attended, "", to_stream=True)


class StableLmDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm of its own, or both after the same."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        self.self_attn = StableLmAttention(args, config, f"{prefix}.self_attn")
        self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        self.input_layernorm = LayerNorm(args.hidden_size, args.layer_norm_eps)
        self.post_attention_layernorm = (
            None if args.use_parallel_residual else LayerNorm(args.hidden_size, args.layer_norm_eps)
        )

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        y = self.input_layernorm(x)
        if self.post_attention_layernorm is None:
            return self.self_attn(y, rotation).add_(self.mlp(y)).add_(x)
        x = self.self_attn(y, rotation).add_(x)
        return self.mlp(self.post_attention_layernorm(x)).add_(x)

    def record(self, program: Program, rotation: NativeRotation) -> None:
        """As `forward` of the stream, in a program."""
        y = program.normed(self.input_layernorm.weights)
        record(self.self_attn, program, y, rotation)
        if self.post_attention_layernorm is not None:
            y = program.normed(self.post_attention_layernorm.weights)
        record(self.mlp, program, y, to_stream=True)


class StableLmForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                StableLmDecoderLayer(args, config, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            LayerNorm(args.hidden_size, args.layer_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
