"""What do decoder-only models have around their layers?

A family's file says how its layers compute; embedding, positions, the last norm, the head and the
way weights come in are the same in nearly all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from jubako.kernels.cpu.recording import NativeRotation, Program, RecordingError, Rows, record
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.norm import LayerNorm, RMSNorm
from jubako.layers.rotary import RotaryEmbedding
from jubako.models.weights import load_weights, with_model_prefix

EVERY = "every"
"""The kind of all layers, where there is one."""


class DecoderModel(nn.Module):
    """Embedding, layers and the last norm.

    A layer is called with x [T, hidden] and the step's rotation, and returns [T, hidden]; it may
    overwrite x. `rotary` has the kinds of rotation, `kinds` names each layer's; a layer whose kind
    is not there (it uses no positions) gets None. A kind may also be another function of positions,
    whose result its layers then get. `embed_scale` multiplies embeddings.
    """

    def __init__(
        self,
        embed_tokens: VocabEmbedding,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        rotary: RotaryEmbedding | Mapping[str, nn.Module],
        kinds: Sequence[str] | None = None,
        *,
        embed_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotary = nn.ModuleDict({EVERY: rotary} if isinstance(rotary, nn.Module) else rotary)
        self.kinds = [EVERY] * len(self.layers) if kinds is None else list(kinds)
        self.embed_scale = embed_scale

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → what `forward` takes as `inputs_embeds`, [T, hidden]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        return x if self.embed_scale is None else x.mul_(self.embed_scale)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids or embeddings of T tokens at `positions` [T] → final hidden states [T, hidden]."""
        x = inputs_embeds
        if x is None:
            assert input_ids is not None, "a step has ids or embeddings"
            x = self.embed_input_ids(input_ids)
        rotations: dict[str, Any] = {k: rotary(positions) for k, rotary in self.rotary.items()}
        for layer, kind in zip(self.layers, self.kinds):
            x = layer(x, rotations.get(kind))
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def record(self, program: Program) -> Rows:
        """As `forward` of the step's ids, in a program."""
        scale = 1.0 if self.embed_scale is None else self.embed_scale
        record(self.embed_tokens, program, scale)
        rotations = {kind: record(rotary, program) for kind, rotary in self.rotary.items()}
        for layer, kind in zip(self.layers, self.kinds):
            record(layer, program, rotations.get(kind))
        return program.final_norm(norm_weights(self.norm))


def norm_weights(norm: nn.Module) -> Any:
    """What a program needs to normalise; RecordingError if the norm is of another kind.

    As for `record`, a subclass that changes `forward` and not `weights` is of another kind.
    """
    if isinstance(norm, RMSNorm | LayerNorm):
        for cls in type(norm).__mro__:
            if "weights" in vars(cls):
                return norm.weights
            if "forward" in vars(cls):
                break
    raise RecordingError(type(norm).__name__)


class PreNormLayer(nn.Module):
    """Attention and MLP, each after a norm and added to what it was made from."""

    def __init__(
        self, self_attn: nn.Module, mlp: nn.Module, hidden_size: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)

    def forward(self, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        x = self.self_attn(self.input_layernorm(x), rotation).add_(x)
        out: torch.Tensor = self.mlp(self.post_attention_layernorm(x)).add_(x)
        return out

    def record(self, program: Program, rotation: NativeRotation | None) -> None:
        """As `forward` of the stream, in a program."""
        x = program.normed(norm_weights(self.input_layernorm))
        record(self.self_attn, program, x, rotation, to_stream=True)
        x = program.normed(norm_weights(self.post_attention_layernorm))
        record(self.mlp, program, x, to_stream=True)


class SandwichNormLayer(nn.Module):
    """Attention and MLP, each between two norms, whose weights are stored less one."""

    def __init__(
        self, self_attn: nn.Module, mlp: nn.Module, hidden_size: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        norm = (hidden_size, norm_eps, 1.0)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.pre_feedforward_layernorm = RMSNorm(*norm)
        self.post_feedforward_layernorm = RMSNorm(*norm)

    def forward(self, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        attended = self.self_attn(self.input_layernorm(x), rotation)
        x = self.post_attention_layernorm(attended).add_(x)
        out: torch.Tensor = self.mlp(self.pre_feedforward_layernorm(x))
        out = self.post_feedforward_layernorm(out).add_(x)
        return out

    def record(self, program: Program, rotation: NativeRotation | None) -> None:
        """As `forward` of the stream, in a program."""
        x = program.normed(norm_weights(self.input_layernorm))
        attended = record(self.self_attn, program, x, rotation)
        program.add(attended, norm_weights(self.post_attention_layernorm))
        x = program.normed(norm_weights(self.pre_feedforward_layernorm))
        out = record(self.mlp, program, x)
        program.add(out, norm_weights(self.post_feedforward_layernorm))


class DecoderForCausalLM(nn.Module):
    """A decoder and its head: the `CausalLM` that the runner knows."""

    def __init__(self, model: DecoderModel, lm_head: LMHead) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → what `forward` takes as `inputs_embeds`, [T, hidden]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids or embeddings of T tokens at `positions` [T] → final hidden states [T, hidden]."""
        hidden: torch.Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [r, hidden] → logits [r, V]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def record(self, program: Program) -> None:
        """As `forward`, and the choice of the best tokens, in a program."""
        self.lm_head.record(program, record(self.model, program))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from Hugging Face's names; see `models.weights.load_weights`."""
        return load_weights(self, weights, self.sanitize)

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        if name.startswith("lm_head.") and self.lm_head.tied:
            return None
        return with_model_prefix(name)
