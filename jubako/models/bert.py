"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and DistilBERT (Sanh et al. 2019).

Encoders: every token sees the whole text. RoBERTa counts positions from behind the padding id,
DistilBERT has no segments. A classifier's first matrix is called differently in each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.checkpoint.architecture import take_apart
from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.layers.activation import activation
from jubako.layers.embedding import VocabEmbedding
from jubako.layers.encoder_attention import EncoderOnlyAttention
from jubako.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from jubako.layers.norm import LayerNorm
from jubako.models.hf_config import value
from jubako.models.weights import load_weights


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    layer_norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int
    """0: no segments."""
    first_position: int
    """Entry of the position table for the first token."""

    @classmethod
    def from_config(cls, c: Mapping[str, Any], stem: str) -> ModelArgs:
        """Of a model whose architecture's name begins with `stem`."""
        kind = value(c, "position_embedding_type", "absolute")
        if kind != "absolute":
            raise UnsupportedModelError(
                f"position_embedding_type={kind!r} in config.json is not supported; only "
                "'absolute' is."
            )
        if stem == "DistilBert":
            return cls(
                vocab_size=value(c, "vocab_size", 30_522),
                hidden_size=value(c, "dim", 768),
                intermediate_size=value(c, "hidden_dim", 3072),
                num_hidden_layers=value(c, "n_layers", 6),
                num_attention_heads=value(c, "n_heads", 12),
                hidden_act=value(c, "activation", "gelu"),
                layer_norm_eps=1e-12,
                max_position_embeddings=value(c, "max_position_embeddings", 512),
                type_vocab_size=0,
                first_position=0,
            )
        return cls(
            vocab_size=value(c, "vocab_size", 30_522),
            hidden_size=value(c, "hidden_size", 768),
            intermediate_size=value(c, "intermediate_size", 3072),
            num_hidden_layers=value(c, "num_hidden_layers", 12),
            num_attention_heads=value(c, "num_attention_heads", 12),
            hidden_act=value(c, "hidden_act", "gelu"),
            layer_norm_eps=value(c, "layer_norm_eps", 1e-12),
            max_position_embeddings=value(c, "max_position_embeddings", 512),
            type_vocab_size=value(c, "type_vocab_size", 2),
            first_position=0 if stem == "Bert" else value(c, "pad_token_id", 1, least=0) + 1,
        )


class BertEmbeddings(nn.Module):
    """The sum of a token's, its position's and its segment's vector, normalised."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.word_embeddings = VocabEmbedding(args.vocab_size, args.hidden_size)
        self.position_embeddings = VocabEmbedding(args.max_position_embeddings, args.hidden_size)
        self.token_type_embeddings = (
            VocabEmbedding(args.type_vocab_size, args.hidden_size) if args.type_vocab_size else None
        )
        self.LayerNorm = LayerNorm(args.hidden_size, args.layer_norm_eps)
        self.first_position = args.first_position

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids, positions from 0 and segments [T] (None: all 0) → [T, hidden]."""
        x = self.word_embeddings(input_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                x += self.token_type_embeddings(input_ids.new_zeros(1))
            else:
                x += self.token_type_embeddings(token_type_ids)
        x += self.position_embeddings(positions + self.first_position)
        normalised: torch.Tensor = self.LayerNorm(x)
        return normalised


class BertAttention(nn.Module):
    """Attention of one layer, with the norm after it."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        heads, size = args.num_attention_heads, args.hidden_size
        head_size = size // heads
        self.qkv_proj = QKVParallelLinear(size, head_size, heads, heads, bias=True)
        self.attn = EncoderOnlyAttention(
            heads, head_size, head_size**-0.5, config=config, layer_name=f"{prefix}.attn"
        )
        self.o_proj = RowParallelLinear(size, size, bias=True)
        self.norm = LayerNorm(size, args.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        qk, v = self.qkv_proj(x)
        q, k = qk.split(self.attn.num_heads, dim=1)
        out: torch.Tensor = self.norm(self.o_proj(self.attn(q, k, v)).add_(x))
        return out


class BertLayer(nn.Module):
    """Attention and MLP, each followed by a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        self.attention = BertAttention(args, config, f"{prefix}.attention")
        self.up_proj = MergedColumnParallelLinear(
            args.hidden_size, {"": args.intermediate_size}, bias=True
        )
        self.down_proj = RowParallelLinear(args.intermediate_size, args.hidden_size, bias=True)
        self.norm = LayerNorm(args.hidden_size, args.layer_norm_eps)
        self.activation = activation(args.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        x = self.attention(x)
        out: torch.Tensor = self.norm(self.down_proj(self.activation(self.up_proj(x))).add_(x))
        return out


class Head(nn.Module):
    """Labels' logits of a pooled vector: `out(act(dense(x)))`, or `out(x)` without the first."""

    def __init__(self, size: int, labels: int, dense_activation: str | None) -> None:
        super().__init__()
        self.dense = None
        if dense_activation is not None:
            self.dense = RowParallelLinear(size, size, bias=True)
            self.activation = activation(dense_activation)
        self.out_proj = RowParallelLinear(size, labels, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [r, hidden] → [r, labels]."""
        if self.dense is not None:
            x = self.activation(self.dense(x))
        return self.out_proj(x)


class BertForPooling(nn.Module):
    """The encoder, and for a classifier its head.

    `takes_token_types`: `forward` can be told which segment each token belongs to.
    """

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        super().__init__()
        parts = take_apart(config.model_config.architecture)
        args = ModelArgs.from_config(config.model_config.hf_config, parts.stem)
        if args.hidden_size % args.num_attention_heads:
            raise UnsupportedModelError(
                f"hidden_size={args.hidden_size} in config.json is no multiple of "
                f"num_attention_heads={args.num_attention_heads}."
            )
        self.takes_token_types = args.type_vocab_size > 1
        self.embeddings = BertEmbeddings(args)
        self.layers = nn.ModuleList(
            BertLayer(args, config, f"{prefix}layers.{i}") for i in range(args.num_hidden_layers)
        )
        self.head: Head | None = None
        labels = config.pooler_config.num_labels
        if labels:
            by_token = parts.role == "token_classify"
            dense = _dense_activation(parts.stem, by_token)
            self.head = Head(args.hidden_size, labels, dense)
        self._names = _names(parts.stem, self.head)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids, positions and perhaps segments [T] → final hidden states [T, hidden]."""
        x = self.embeddings(input_ids, positions, token_type_ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def compute_scores(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [r, hidden] → logits of the labels [r, labels]."""
        assert self.head is not None, "a model that embeds has no labels"
        scores: torch.Tensor = self.head(pooled)
        return scores

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from Hugging Face's names; see `models.weights.load_weights`."""
        return load_weights(self, weights, self.sanitize)

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        for pattern, own in self._names:
            new, count = pattern.subn(own or "", name)
            if count:
                if own is None:
                    return None
                name = new
        return name


def _dense_activation(stem: str, by_token: bool) -> str | None:
    """What follows the first of a classifier's two matrices; None if it has only one."""
    if by_token:
        return None
    return "relu" if stem == "DistilBert" else "tanh"


def _names(stem: str, head: Head | None) -> list[tuple[re.Pattern[str], str | None]]:
    """How a checkpoint's names become the model's, one rule after the other; None: not wanted."""
    rules: list[tuple[str, str | None]] = [
        (r"^(cls|lm_head|vocab_transform|vocab_layer_norm|vocab_projector)\.", None),
        (r"embeddings\.position_ids$", None),
    ]
    if head is None:
        rules.append((r"^((bert|roberta)\.)?pooler\.", None))
    else:
        # Only BERT's classifiers use the first matrix of the encoder's own pooler.
        own = r"head.dense." if stem == "Bert" and head.dense is not None else None
        rules.append((r"^((bert|roberta)\.)?pooler\.dense\.", own))
        rules += [
            (r"^pre_classifier\.", "head.dense."),
            (r"^classifier\.dense\.", "head.dense."),
            (r"^classifier\.(out_proj\.)?", "head.out_proj."),
        ]
    rules += [
        (r"^(bert|roberta|distilbert)\.", ""),
        (r"^(encoder|transformer)\.layer\.", "layers."),
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
        (r"\.attention\.self\.(query|key|value)\.", r".attention.\1."),
        (r"\.attention\.(q_lin|query)\.", ".attention.q_proj."),
        (r"\.attention\.(k_lin|key)\.", ".attention.k_proj."),
        (r"\.attention\.(v_lin|value)\.", ".attention.v_proj."),
        (r"\.attention\.(out_lin|output\.dense)\.", ".attention.o_proj."),
        (r"\.(attention\.output\.LayerNorm|sa_layer_norm)\.", ".attention.norm."),
        (r"\.(intermediate\.dense|ffn\.lin1)\.", ".up_proj."),
        (r"\.(output\.dense|ffn\.lin2)\.", ".down_proj."),
        (r"\.(output\.LayerNorm|output_layer_norm)\.", ".norm."),
    ]
    return [(re.compile(pattern), own) for pattern, own in rules]
