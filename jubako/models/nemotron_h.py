"""Nemotron-H (NVIDIA 2025): layers of one kind each, recurrence, attention, MLP or experts.

A pattern says which; attention knows no positions, and MLPs square what ReLU lets through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.kernels.cpu.recording import (
    EXPERT_ACTIVATIONS,
    ExpertChoice,
    ExpertRules,
    NativeRotation,
    Program,
    RecordingError,
    Rows,
)
from jubako.kernels.registry import get_kernels
from jubako.layers.activation import activation, plain_form
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.expert_routing import biased_sigmoid_top_k_in_groups
from jubako.layers.mamba2 import Mamba2Args, Mamba2Mixer
from jubako.layers.mlp import PlainMLP
from jubako.layers.moe import Float32Router, pack_expert_parameters
from jubako.layers.rotary import Rotation
from jubako.layers.self_attention import SelfAttention
from jubako.layers.weights import WeightTarget, parameter, whole_parameter
from jubako.models.decoder import DecoderForCausalLM, DecoderModel
from jubako.models.hf_config import experts_per_token, integer_or_none, kv_heads, value
from jubako.models.mamba2 import MixerBlock, RoundedRMSNorm, decoder_name
from jubako.models.mamba_config import (
    ATTENTION,
    MAMBA,
    MLP,
    MOE,
    check_groups,
    layer_kinds,
    require_silu,
)

_PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}


@dataclass(frozen=True)
class ExpertArgs:
    """Router and experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    num_groups: int
    chosen_groups: int
    normalise: bool
    factor: float


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    residual_in_fp32: bool
    mlp_bias: bool
    kinds: list[str]
    mixer: Mamba2Args
    experts: ExpertArgs | None
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Nemotron-H model."""
        require_silu(c, "mamba_hidden_act")
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        eps = value(c, "layer_norm_epsilon", 1e-5)
        mamba_heads, groups = value(c, "mamba_num_heads", 128), value(c, "n_groups", 8)
        check_groups(mamba_heads, groups)
        bias = value(c, "use_bias", False)
        kinds = _kinds(c)
        if c.get("sliding_window") is not None:
            raise UnsupportedModelError("sliding_window is not supported for Nemotron-H models.")
        return cls(
            vocab_size=value(c, "vocab_size", 131_072),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 21_504),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            head_dim=value(c, "head_dim", 128),
            hidden_act=value(c, "mlp_hidden_act", "relu2"),
            rms_norm_eps=eps,
            residual_in_fp32=value(c, "residual_in_fp32", False),
            mlp_bias=value(c, "mlp_bias", False),
            kinds=kinds,
            mixer=Mamba2Args(
                hidden_size=hidden_size,
                num_heads=mamba_heads,
                head_dim=value(c, "mamba_head_dim", 64),
                num_groups=groups,
                state_size=value(c, "ssm_state_size", 128),
                conv_kernel=value(c, "conv_kernel", 4, least=2),
                conv_bias=value(c, "use_conv_bias", True),
                in_bias=bias,
                out_bias=bias,
                norm_eps=eps,
                # `time_step_limit` stands in config.json, but is not what these models use.
                time_step_limit=(value(c, "time_step_min", 0.001), math.inf),
                norm_groups=groups,
            ),
            experts=_experts(c) if MOE in kinds else None,
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


def _kinds(c: Mapping[str, Any]) -> list[str]:
    names = c.get("layers_block_type")
    if names is not None:
        count = value(c, "num_hidden_layers", len(names) if isinstance(names, list) else 1)
        return layer_kinds(names, count, "layers_block_type")
    pattern = value(c, "hybrid_override_pattern", "")
    unknown = set(pattern) - _PATTERN.keys()
    if not pattern or unknown:
        raise CheckpointError(
            "config.json needs layers_block_type, or a hybrid_override_pattern of "
            f"{', '.join(_PATTERN)}; got {pattern!r:.60}."
        )
    kinds = [_PATTERN[letter] for letter in pattern]
    return layer_kinds(kinds, value(c, "num_hidden_layers", len(kinds)), "hybrid_override_pattern")


def _experts(c: Mapping[str, Any]) -> ExpertArgs:
    if integer_or_none(c, "moe_latent_size") is not None:
        raise UnsupportedModelError(
            "moe_latent_size is not supported for Nemotron-H models; only experts on the hidden "
            "size are."
        )
    count = value(c, "n_routed_experts", 8)
    return ExpertArgs(
        num_experts=count,
        top_k=experts_per_token(c, 2, count),
        intermediate_size=value(c, "moe_intermediate_size", 7688),
        shared_intermediate_size=value(c, "moe_shared_expert_intermediate_size", 7688),
        num_groups=value(c, "n_group", 1),
        chosen_groups=value(c, "topk_group", 1),
        normalise=value(c, "norm_topk_prob", True),
        factor=value(c, "routed_scaling_factor", 1.0),
    )


class PlainExperts(nn.Module):
    """MLPs without gates, of which each token asks a few."""

    def __init__(self, args: ModelArgs, experts: ExpertArgs) -> None:
        super().__init__()
        count, size = experts.num_experts, experts.intermediate_size
        self.up = parameter(count, size, args.hidden_size)
        self.down = parameter(count, args.hidden_size, size)
        self.activation = activation(args.hidden_act)
        self.rules = ExpertRules(plain_form(args.hidden_act))
        # The matrices in the form that the kernels like best, instead of `up` and `down`.
        self.packed_up: Any = None
        self.packed_down: Any = None
        self.kernels = get_kernels()

    def pack(self, quantization: str = "none") -> None:
        """Let the kernels take over the matrices, if they know the activation."""
        if self.packed_up is None and self.rules.activation in EXPERT_ACTIVATIONS:
            self.packed_up, self.packed_down = pack_expert_parameters(
                self.kernels, self.up, self.down, quantization, gated=False
            )

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """x [T, hidden], weights and ids [T, k] → the weighted sum of answers, [T, hidden]."""
        if self.packed_up is not None:
            packed = (self.packed_up, self.packed_down)
            return self.kernels.packed_experts(x, packed, weights, expert_ids, self.rules)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in expert_ids.unique().tolist():
            rows, places = (expert_ids == expert).nonzero(as_tuple=True)
            inner = self.activation(x[rows] @ self.up[expert].T)
            answer = (inner @ self.down[expert].T).float()
            out.index_add_(0, rows, answer * weights[rows, places, None])
        return out.to(x.dtype)

    def record(self, program: Program, x: Rows, logits: Rows, routing: ExpertChoice) -> Rows:
        """As `forward` by the experts that a router's logits choose, added to the stream."""
        if self.packed_up is None:
            raise RecordingError("experts that are not packed")
        packed = (self.packed_up, self.packed_down)
        return program.experts(x, logits, routing, packed, self.rules, "delta", to_stream=True)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """A tensor for each matrix of each expert, or one for all experts'."""
        for part, whole in (("up_proj", self.up), ("down_proj", self.down)):
            names = []
            for expert, view in enumerate(whole.data):
                names.append(f"{name}.{expert}.{part}.weight")
                yield names[-1], WeightTarget(view, tuple(view.shape))
            yield f"{name}.{part}", whole_parameter(whole, parts=tuple(names))


class NemotronRouter(Float32Router):
    """Chooses experts."""

    def __init__(self, args: ModelArgs, experts: ExpertArgs) -> None:
        super().__init__(args.hidden_size, experts.num_experts)
        self.args = experts
        self.correction_bias = parameter(experts.num_experts, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] → weights and ids [T, k]."""
        args = self.args
        return biased_sigmoid_top_k_in_groups(
            self.logits(x),
            args.top_k,
            bias=self.correction_bias,
            groups=args.num_groups,
            chosen_groups=args.chosen_groups,
            normalise=args.normalise,
            factor=args.factor,
        )

    @property
    def routing(self) -> ExpertChoice:
        """How experts come from the logits, for a program."""
        args = self.args
        return ExpertChoice(
            args.top_k,
            "sigmoid",
            args.normalise,
            args.factor,
            self.correction_bias,
            args.num_groups,
            args.chosen_groups,
            group_best=2,
        )

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight` and `e_score_correction_bias`."""
        yield f"{name}.weight", whole_parameter(self.weight)
        yield f"{name}.e_score_correction_bias", whole_parameter(self.correction_bias)


class NemotronHMoE(nn.Module):
    """Experts that a router chooses, and one that every token asks."""

    def __init__(self, args: ModelArgs, experts: ExpertArgs) -> None:
        super().__init__()
        self.gate = NemotronRouter(args, experts)
        self.experts = PlainExperts(args, experts)
        self.shared_experts = PlainMLP(
            args.hidden_size, experts.shared_intermediate_size, args.hidden_act, args.mlp_bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        out: torch.Tensor = self.experts(x, *self.gate(x))
        return out.add_(self.shared_experts(x))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program, added to the residual stream."""
        if not to_stream:
            raise RecordingError("experts beside others that are not added to the stream")
        logits = self.gate.record_logits(program, x)
        self.experts.record(program, x, logits, self.gate.routing)
        return self.shared_experts.record(program, x, to_stream=True)


class NemotronHAttention(SelfAttention):
    """Attention without positions."""

    def forward(self, x: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        assert rotation is None
        return super().forward(x, None)

    def record(
        self,
        program: Program,
        x: Rows,
        rotation: NativeRotation | None = None,
        *,
        to_stream: bool = False,
    ) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        return super().record(program, x, rotation, to_stream=to_stream)


def _mixer(args: ModelArgs, kind: str, config: JubakoConfig, prefix: str) -> nn.Module:
    if kind == MAMBA:
        return Mamba2Mixer(args.mixer, config=config, prefix=prefix)
    if kind == ATTENTION:
        return NemotronHAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=prefix,
        )
    if kind == MOE:
        assert args.experts is not None
        return NemotronHMoE(args, args.experts)
    return PlainMLP(args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias)


class NemotronHForCausalLM(DecoderForCausalLM):
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
                    _mixer(args, kind, config, f"{prefix}model.layers.{i}.mixer"),
                    args.residual_in_fp32,
                )
                for i, kind in enumerate(args.kinds)
            ],
            RoundedRMSNorm(args.hidden_size, args.rms_norm_eps),
            {},
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        return super().sanitize(decoder_name(name))
