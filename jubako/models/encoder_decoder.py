"""What do encoder-decoder models have in common (Vaswani et al. 2017, arXiv 1706.03762)?

An encoder reads a request's whole input, both ways; the decoder writes, and reads in every layer
what the encoder made. A family's file says what comes before the layers and behind them. Norms
stand behind attention and MLP (BART), or before them (Whisper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.kernels.metadata import AttentionMetadata
from jubako.layers.activation import activation
from jubako.layers.attention import Attention
from jubako.layers.bidirectional_attention import BidirectionalAttention
from jubako.layers.cross_attention import CrossAttention
from jubako.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from jubako.layers.norm import LayerNorm
from jubako.models.hf_config import value

NORM_EPS = 1e-5


@dataclass(frozen=True)
class LayerArgs:
    """Layers of one side, encoder or decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    act: str
    norm_first: bool

    @property
    def head_size(self) -> int:
        """Length of a head's query, key and value."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_config(
        cls,
        c: Mapping[str, Any],
        side: str,
        *,
        layers: int,
        heads: int,
        ffn: int,
        size: int,
        norm_first: bool,
    ) -> LayerArgs:
        """Of `side`, "encoder" or "decoder"; the numbers are the family's defaults."""
        hidden_size = value(c, "d_model", size)
        num_heads = value(c, f"{side}_attention_heads", heads)
        if hidden_size % num_heads:
            raise UnsupportedModelError(
                f"d_model={hidden_size} in config.json is no multiple of {side}_attention_heads="
                f"{num_heads}."
            )
        return cls(
            num_layers=value(c, f"{side}_layers", layers),
            hidden_size=hidden_size,
            num_heads=num_heads,
            ffn_size=value(c, f"{side}_ffn_dim", ffn),
            act=value(c, "activation_function", "gelu"),
            norm_first=norm_first,
        )


class SelfAttention(nn.Module):
    """Attention of a layer to its own side's tokens, to those that `attn` lets it see."""

    def __init__(self, args: LayerArgs, attn: BidirectionalAttention | Attention) -> None:
        super().__init__()
        heads, hidden = args.num_heads, args.hidden_size
        self.qkv_proj = QKVParallelLinear(hidden, args.head_size, heads, heads, bias=True)
        self.attn = attn
        self.out_proj = RowParallelLinear(hidden, hidden, bias=True)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        """x [T, hidden], and what else `attn` takes → [T, hidden]."""
        qk, v = self.qkv_proj(x)
        q, k = qk.split(self.attn.num_heads, dim=1)
        return self.out_proj(self.attn(q, k, v, *more))


class DecoderCrossAttention(nn.Module):
    """Attention of a decoder layer to the encoder's outputs."""

    def __init__(self, args: LayerArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        heads, size, hidden = args.num_heads, args.head_size, args.hidden_size
        self.q_proj = RowParallelLinear(hidden, hidden, bias=True)
        self.kv_proj = MergedColumnParallelLinear(
            hidden, {"k_proj": hidden, "v_proj": hidden}, bias=True
        )
        self.attn = CrossAttention(
            heads, size, size**-0.5, config=config, layer_name=f"{prefix}.attn"
        )
        self.out_proj = RowParallelLinear(hidden, hidden, bias=True)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
        """x [T, hidden], new encoder outputs [E, hidden] → [T, hidden]."""
        k = v = None
        if encoded is not None:
            heads = self.kv_proj(encoded).unflatten(1, (-1, self.attn.head_size))
            k, v = heads.split(self.attn.num_kv_heads, dim=1)
        q = self.q_proj(x).unflatten(1, (self.attn.num_heads, -1))
        return self.out_proj(self.attn(q, k, v))


class _Layer(nn.Module):
    """Parts, each with a norm before or behind it, each added to what it was made from."""

    def __init__(self, args: LayerArgs) -> None:
        super().__init__()
        self.norm_first = args.norm_first
        self.self_attn_layer_norm = LayerNorm(args.hidden_size, NORM_EPS)
        self.fc1 = MergedColumnParallelLinear(args.hidden_size, {"": args.ffn_size}, bias=True)
        self.fc2 = RowParallelLinear(args.ffn_size, args.hidden_size, bias=True)
        self.final_layer_norm = LayerNorm(args.hidden_size, NORM_EPS)
        self.activation = activation(args.act)

    def _around(
        self,
        part: Callable[..., torch.Tensor],
        norm: LayerNorm,
        x: torch.Tensor,
        *more: Any,
    ) -> torch.Tensor:
        """x [T, hidden] → [T, hidden], through one part."""
        if self.norm_first:
            return part(norm(x), *more).add_(x)
        out: torch.Tensor = norm(part(x, *more).add_(x))
        return out

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


class EncoderLayer(_Layer):
    """Attention both ways, and MLP."""

    def __init__(self, args: LayerArgs) -> None:
        super().__init__(args)
        heads, size = args.num_heads, args.head_size
        self.self_attn = SelfAttention(args, BidirectionalAttention(heads, size, size**-0.5))

    def forward(self, x: torch.Tensor, sequences: AttentionMetadata) -> torch.Tensor:
        """x [T, hidden] of `sequences` → [T, hidden]."""
        x = self._around(self.self_attn, self.self_attn_layer_norm, x, sequences)
        return self._around(self._mlp, self.final_layer_norm, x)


class DecoderLayer(_Layer):
    """Attention to earlier tokens, attention to the encoder's outputs, and MLP."""

    def __init__(self, args: LayerArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__(args)
        heads, size = args.num_heads, args.head_size
        attn = Attention(
            heads, size, size**-0.5, heads, config=config, layer_name=f"{prefix}.self_attn.attn"
        )
        self.self_attn = SelfAttention(args, attn)
        self.encoder_attn = DecoderCrossAttention(args, config, f"{prefix}.encoder_attn")
        self.encoder_attn_layer_norm = LayerNorm(args.hidden_size, NORM_EPS)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
        """x [T, hidden], new encoder outputs [E, hidden] → [T, hidden]."""
        x = self._around(self.self_attn, self.self_attn_layer_norm, x)
        x = self._around(self.encoder_attn, self.encoder_attn_layer_norm, x, encoded)
        return self._around(self._mlp, self.final_layer_norm, x)


class EncoderDecoder(nn.Module):
    """How the engine runs such a model; `model.decoder` has the embeddings and the layers."""

    model: Any

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → what `forward` takes as `inputs_embeds`, [T, hidden]."""
        x: torch.Tensor = self.model.decoder.embed_input_ids(input_ids)
        return x

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        encoder_outputs: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Ids or embeddings of T tokens at `positions` [T] → final hidden states [T, hidden].

        `encoder_outputs` are those of requests whose first tokens these are, in their order.
        """
        if inputs_embeds is None:
            assert input_ids is not None, "a step has ids or embeddings"
            inputs_embeds = self.embed_input_ids(input_ids)
        out: torch.Tensor = self.model.decoder(inputs_embeds, positions, _joined(encoder_outputs))
        return out


def _joined(encoder_outputs: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    """Outputs of several requests [n, hidden], one behind the other; None if there are none."""
    if not encoder_outputs:
        return None
    return encoder_outputs[0] if len(encoder_outputs) == 1 else torch.cat(list(encoder_outputs))


def with_zeros_for(
    weights: Iterable[tuple[str, torch.Tensor]], may_lack: Callable[[str], str | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, and zeros [n] for each bias that the checkpoint may lack and does.

    `may_lack` turns the name of a tensor [n, ...] into that of such a bias, or None.
    """
    seen: set[str] = set()
    biases: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        seen.add(name)
        bias = may_lack(name)
        if bias is not None:
            biases[bias] = tensor.new_zeros(tensor.shape[:1])
        yield name, tensor
    for name, zeros in biases.items():
        if name not in seen:
            yield name, zeros


def key_bias(name: str) -> str | None:
    """The bias beside a key matrix, which adds the same to all scores of a query: many leave it."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}.bias" if kind == "weight" and stem.endswith(".k_proj") else None
