"""DeepSeek V2 (arXiv 2405.04434), V3 (arXiv 2412.19437) and models of their shape.

Kimi K2 and Moonlight call themselves V3; GLM 4.7 Flash and Youtu have names of their own.
Multi-head latent attention; after the first layers a mixture of many small experts, of which some
are shared by all tokens. The models differ in how tokens choose their experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.kernels.cpu.recording import ExpertChoice, Program, RecordingError, Rows
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.expert_routing import (
    Routing,
    biased_sigmoid_top_k_in_groups,
    softmax_top_k_in_groups,
)
from jubako.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from jubako.layers.mla import MLAAttention
from jubako.layers.mlp import GatedMLP
from jubako.layers.moe import Experts, Float32Router
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import QKRope, RopeParameters, RotaryEmbedding, Rotation
from jubako.layers.weights import WeightTarget, whole_parameter
from jubako.models.decoder import DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import number_or_none, rope_parameters, value

_V3: dict[str, Any] = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        **_V3,
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "DeepseekV3ForCausalLM": _V3,
    "Glm4MoeLiteForCausalLM": {
        **_V3,
        "vocab_size": 154_880,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
    "YoutuForCausalLM": {
        **_V3,
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "first_k_dense_replace": None,
    },
}
"""By architecture, transformers' default of what config.json leaves out.

With None for `first_k_dense_replace` no layer has experts.
"""


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    rope: RopeParameters
    rope_interleave: bool
    tie_word_embeddings: bool

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    sparse_layers: list[bool]
    """Which layers have experts."""
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sigmoid_scores: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any], architecture: str) -> ModelArgs:
        """Of a model of one of the architectures in DEFAULTS."""
        defaults = DEFAULTS[architecture]

        def get(name: str, least: int = 1) -> Any:
            return value(c, name, defaults[name], least)

        v2 = architecture == "DeepseekV2ForCausalLM"
        _refuse_other(c, "moe_layer_freq", 1)
        _refuse_other(c, "scoring_func", "softmax" if v2 else "sigmoid")
        if v2:
            # Its definitions disagree about what would be scaled.
            _refuse_other(c, "norm_topk_prob", False)
        groups, chosen_groups = get("n_group"), get("topk_group")
        method = value(c, "topk_method", "greedy" if v2 else "noaux_tc")
        if v2 and method == "greedy":
            groups, chosen_groups = 1, 1
        elif method != ("group_limited_greedy" if v2 else "noaux_tc"):
            raise UnsupportedModelError(
                f"The model's topk_method {method!r} is not supported; "
                f"known are {'greedy and group_limited_greedy' if v2 else 'noaux_tc'}."
            )
        # A null means that queries are projected in one step.
        one_step = "q_lora_rank" in c and c["q_lora_rank"] is None
        num_layers = get("num_hidden_layers")
        args = cls(
            vocab_size=get("vocab_size"),
            hidden_size=get("hidden_size"),
            intermediate_size=get("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=get("num_attention_heads"),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=get("rms_norm_eps"),
            attention_bias=value(c, "attention_bias", False),
            mlp_bias=value(c, "mlp_bias", False),
            rope=rope_parameters(c, get("max_position_embeddings")),
            rope_interleave=v2 or value(c, "rope_interleave", True),
            tie_word_embeddings=get("tie_word_embeddings"),
            q_lora_rank=None if one_step else get("q_lora_rank"),
            kv_lora_rank=get("kv_lora_rank"),
            qk_nope_head_dim=get("qk_nope_head_dim"),
            qk_rope_head_dim=get("qk_rope_head_dim"),
            v_head_dim=get("v_head_dim"),
            sparse_layers=_sparse_layers(c, num_layers, defaults["first_k_dense_replace"]),
            moe_intermediate_size=get("moe_intermediate_size"),
            n_routed_experts=get("n_routed_experts"),
            n_shared_experts=get("n_shared_experts"),
            num_experts_per_tok=get("num_experts_per_tok"),
            n_group=groups,
            topk_group=chosen_groups,
            norm_topk_prob=not v2 and value(c, "norm_topk_prob", True),
            routed_scaling_factor=get("routed_scaling_factor"),
            sigmoid_scores=not v2,
        )
        if any(args.sparse_layers):
            args.check_groups()
        return args

    def check_groups(self) -> None:
        """UnsupportedModelError if the experts cannot be chosen as the configuration says."""
        size, rest = divmod(self.n_routed_experts, self.n_group)
        reachable = size * self.topk_group
        if rest or self.topk_group > self.n_group or self.num_experts_per_tok > reachable:
            raise UnsupportedModelError(
                f"The model's config.json wants {self.num_experts_per_tok} of "
                f"{self.n_routed_experts} experts (num_experts_per_tok, n_routed_experts) in "
                f"{self.topk_group} of {self.n_group} groups (topk_group, n_group). "
                "That cannot be."
            )

    @property
    def attention_scale(self) -> float:
        """Of q·k; contexts stretched by YaRN sharpen it by `mscale_all_dim`."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        scaling = self.rope.scaling
        if self.rope.rope_type == "default" or not scaling.get("mscale_all_dim"):
            return scale
        all_dims, factor = (
            number_or_none(scaling, "mscale_all_dim"),
            number_or_none(scaling, "factor"),
        )
        if all_dims is None or factor is None:
            raise UnsupportedModelError(
                "The model's rope parameters have mscale_all_dim but no factor; both are needed."
            )
        return scale * (0.1 * all_dims * math.log(max(factor, 1.0)) + 1.0) ** 2


def _refuse_other(c: Mapping[str, Any], name: str, known: Any) -> None:
    if c.get(name, known) != known:
        raise UnsupportedModelError(
            f"The model's {name} {c[name]!r} is not supported; known is {known!r}."
        )


def _sparse_layers(c: Mapping[str, Any], num_layers: int, default: int | None) -> list[bool]:
    """The first `first_k_dense_replace` layers have no experts, or `mlp_layer_types` tells."""
    if default is None:
        return [False] * num_layers
    types = c.get("mlp_layer_types")
    if types is None:
        dense = value(c, "first_k_dense_replace", default, least=0)
        return [i >= dense for i in range(num_layers)]
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in ("dense", "sparse") for kind in types)
    ):
        raise UnsupportedModelError(
            f"The model's mlp_layer_types must be dense or sparse for each of {num_layers} layers."
        )
    return [kind == "sparse" for kind in types]


class DeepseekAttention(nn.Module):
    """Attention of one layer: queries and latents are projected down, and up again."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        heads, rope_size = args.num_attention_heads, args.qk_rope_head_dim
        self.query_size = args.qk_nope_head_dim + rope_size
        self.nope_size = args.qk_nope_head_dim
        self.splits = [args.kv_lora_rank, rope_size]
        latent = {"kv_a_proj_with_mqa": args.kv_lora_rank + rope_size}
        rank, bias = args.q_lora_rank, args.attention_bias
        if rank is None:
            self.a_proj = MergedColumnParallelLinear(args.hidden_size, latent, bias)
            self.q_proj = MergedColumnParallelLinear(
                args.hidden_size, {"q_proj": heads * self.query_size}
            )
        else:
            self.splits.insert(0, rank)
            self.a_proj = MergedColumnParallelLinear(
                args.hidden_size, {"q_a_proj": rank, **latent}, bias
            )
            self.q_a_layernorm = RMSNorm(rank, args.rms_norm_eps)
            self.q_proj = MergedColumnParallelLinear(rank, {"q_b_proj": heads * self.query_size})
        self.kv_a_layernorm = RMSNorm(args.kv_lora_rank, args.rms_norm_eps)
        self.rope = QKRope(interleaved=args.rope_interleave)
        self.attn = MLAAttention(
            heads,
            nope_size=self.nope_size,
            rope_size=rope_size,
            value_size=args.v_head_dim,
            latent_size=args.kv_lora_rank,
            scale=args.attention_scale,
            config=config,
            layer_name=f"{prefix}.attn",
        )
        self.o_proj = RowParallelLinear(heads * args.v_head_dim, args.hidden_size, bias)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        *q_latent, latent, key_rope = self.a_proj(x).split(self.splits, dim=-1)
        q = self.q_proj(self.q_a_layernorm(q_latent[0]) if q_latent else x)
        q = q.unflatten(-1, (-1, self.query_size))
        rotated = self.rope(
            torch.cat((q[..., self.nope_size :], key_rope[:, None]), dim=1), rotation
        )
        q[..., self.nope_size :] = rotated[:, :-1]
        return self.o_proj(self.attn(q, self.kv_a_layernorm(latent), rotated[:, -1]))


class DeepseekRouter(Float32Router):
    """Which experts a token goes to, decided in float32 whatever the model's dtype."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args.hidden_size, args.n_routed_experts)
        self.args = args
        bias = torch.empty(args.n_routed_experts, dtype=torch.float32)
        self.register_buffer("bias", bias if args.sigmoid_scores else None, persistent=False)
        self.bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> Routing:
        """x [T, hidden] → weights and expert numbers, [T, k] each."""
        args = self.args
        logits = self.logits(x)
        if self.bias is None:
            return softmax_top_k_in_groups(
                logits,
                args.num_experts_per_tok,
                groups=args.n_group,
                chosen_groups=args.topk_group,
                factor=args.routed_scaling_factor,
            )
        return biased_sigmoid_top_k_in_groups(
            logits,
            args.num_experts_per_tok,
            bias=self.bias,
            groups=args.n_group,
            chosen_groups=args.topk_group,
            normalise=args.norm_topk_prob,
            factor=args.routed_scaling_factor,
        )

    @property
    def routing(self) -> ExpertChoice:
        """How experts come from the logits, for a program."""
        args = self.args
        by_bias = self.bias is not None
        return ExpertChoice(
            args.num_experts_per_tok,
            "sigmoid" if by_bias else "softmax",
            by_bias and args.norm_topk_prob,
            args.routed_scaling_factor,
            self.bias,
            args.n_group,
            args.topk_group,
            group_best=2 if by_bias else 1,
        )

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`, and `e_score_correction_bias` if there is one."""
        yield f"{name}.weight", whole_parameter(self.weight)
        if self.bias is not None:
            yield (
                f"{name}.e_score_correction_bias",
                WeightTarget(self.bias, tuple(self.bias.shape)),
            )


class DeepseekMoE(nn.Module):
    """Experts that tokens choose, and experts that all tokens share, as one MLP."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.gate = DeepseekRouter(args)
        self.experts = Experts(
            args.n_routed_experts, args.hidden_size, args.moe_intermediate_size, args.hidden_act
        )
        self.shared_experts = GatedMLP(
            args.hidden_size,
            args.moe_intermediate_size * args.n_shared_experts,
            args.hidden_act,
            args.mlp_bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        weights, expert_ids = self.gate(x)
        out: torch.Tensor = self.experts(x, weights, expert_ids)
        return out.add_(self.shared_experts(x))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program, added to the residual stream."""
        if not to_stream:
            raise RecordingError("experts beside others that are not added to the stream")
        logits = self.gate.record_logits(program, x)
        self.experts.record(program, x, logits, self.gate.routing, to_stream=True)
        return self.shared_experts.record(program, x, to_stream=True)


class DeepseekDecoderLayer(PreNormLayer):
    """Attention, and an MLP or a mixture of experts, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        self_attn = DeepseekAttention(args, config, f"{prefix}.self_attn")
        mlp = (
            DeepseekMoE(args)
            if args.sparse_layers[layer]
            else GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias)
        )
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class DeepseekForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(
            config.model_config.hf_config, config.model_config.architecture
        )
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                DeepseekDecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.qk_rope_head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
        predictors = value(config.model_config.hf_config, "num_nextn_predict_layers", 0, least=0)
        self.unused = tuple(
            f"model.layers.{args.num_hidden_layers + i}." for i in range(predictors)
        )

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted.

        Layers after the last predict further tokens; they are for drafting.
        """
        own_name = super().sanitize(name)
        return None if own_name is None or own_name.startswith(self.unused) else own_name
