"""Mamba 2 (Dao and Gu 2024): layers of one recurrence each, no attention and no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import NormWeights, Program, record
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mamba2 import Mamba2Args, Mamba2Mixer
from jubako.layers.norm import RMSNorm
from jubako.models.decoder import DecoderForCausalLM, DecoderModel
from jubako.models.hf_config import value
from jubako.models.mamba_config import check_groups, head_sizes, require_silu, time_step_limit
from jubako.models.weights import with_model_prefix

_OWN_NAMES = {"embeddings": "embed_tokens", "embedding": "embed_tokens", "norm_f": "norm"}


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    residual_in_fp32: bool
    mixer: Mamba2Args
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Mamba 2 model."""
        require_silu(c, "hidden_act")
        hidden_size = value(c, "hidden_size", 4096)
        eps = value(c, "layer_norm_epsilon", 1e-5)
        heads, head_dim = head_sizes(
            value(c, "num_heads", 128),
            value(c, "head_dim", 64),
            value(c, "expand", 2) * hidden_size,
            "head_dim",
        )
        bias = value(c, "use_bias", False)
        groups = value(c, "n_groups", 8)
        check_groups(heads, groups)
        return cls(
            vocab_size=value(c, "vocab_size", 32_768),
            hidden_size=hidden_size,
            num_hidden_layers=value(c, "num_hidden_layers", 64),
            rms_norm_eps=eps,
            residual_in_fp32=value(c, "residual_in_fp32", True),
            mixer=Mamba2Args(
                hidden_size=hidden_size,
                num_heads=heads,
                head_dim=head_dim,
                num_groups=groups,
                state_size=value(c, "state_size", 128),
                conv_kernel=value(c, "conv_kernel", 4, least=2),
                conv_bias=value(c, "use_conv_bias", True),
                in_bias=bias,
                out_bias=bias,
                norm_eps=eps,
                time_step_limit=time_step_limit(c),
                norm_groups=groups,
            ),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class RoundedRMSNorm(RMSNorm):
    """A norm of sums that may be kept in float32; what it returns has the model's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.dtype = torch.get_default_dtype()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] → the same shape."""
        return super().forward(x).to(self.dtype)

    @property
    def weights(self) -> NormWeights:
        """What a program needs to normalise: its sums are float32, and results are rounded."""
        return super().weights


class MixerBlock(nn.Module):
    """A mixer after a norm, and its input added; with `residual_in_fp32` the sum is in float32."""

    def __init__(self, size: int, eps: float, mixer: nn.Module, residual_in_fp32: bool) -> None:
        super().__init__()
        self.norm = RoundedRMSNorm(size, eps)
        self.mixer = mixer
        self.residual_in_fp32 = residual_in_fp32

    def forward(self, x: torch.Tensor, rotation: None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        out: torch.Tensor = self.mixer(self.norm(x))
        if self.residual_in_fp32:
            x = x.float()
        return x + out

    def record(self, program: Program, rotation: None) -> None:
        """As `forward` of the stream, in a program."""
        del rotation
        x = program.normed(self.norm.weights)
        record(self.mixer, program, x, to_stream=True)


class Mamba2ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                MixerBlock(
                    args.hidden_size,
                    args.rms_norm_eps,
                    Mamba2Mixer(
                        args.mixer, config=config, prefix=f"{prefix}model.layers.{i}.mixer"
                    ),
                    args.residual_in_fp32,
                )
                for i in range(args.num_hidden_layers)
            ],
            RoundedRMSNorm(args.hidden_size, args.rms_norm_eps),
            {},
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        return super().sanitize(decoder_name(name))


def decoder_name(name: str) -> str:
    """The name in `models.decoder` of a tensor that is named as in the Mamba family."""
    if name.startswith("lm_head."):
        return name
    name = with_model_prefix(name.removeprefix("backbone."))
    prefix, _, rest = name.partition(".")
    first, dot, rest = rest.partition(".")
    return f"{prefix}.{_OWN_NAMES.get(first, first)}{dot}{rest}"
