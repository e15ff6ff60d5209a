"""BART (Lewis et al. 2019, arXiv 1910.13461): text in, text out.

Norms stand behind attention and MLP, and one behind the embeddings. Learned positions begin at the
third entry of their table. Encoder, decoder and head share one matrix where embeddings are tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.layers.bidirectional_attention import whole_sequences
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.learned_positions import LearnedPositions
from jubako.layers.norm import LayerNorm
from jubako.layers.weights import WeightTarget, parameter, whole_parameter
from jubako.models.encoder_decoder import (
    NORM_EPS,
    DecoderLayer,
    EncoderDecoder,
    EncoderLayer,
    LayerArgs,
    key_bias,
    with_zeros_for,
)
from jubako.models.hf_config import value
from jubako.models.weights import load_weights

FIRST_POSITION = 2
"""Entry of the position table for the first token."""

_EMBEDDINGS = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)
_BIAS = "final_logits_bias"


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    embed_scale: float
    tie_word_embeddings: bool
    encoder: LayerArgs
    decoder: LayerArgs

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a BART model."""
        sizes: dict[str, Any] = {"layers": 12, "heads": 16, "ffn": 4096, "size": 1024}
        hidden_size = value(c, "d_model", 1024)
        return cls(
            vocab_size=value(c, "vocab_size", 50_265),
            hidden_size=hidden_size,
            max_position_embeddings=value(c, "max_position_embeddings", 1024),
            embed_scale=hidden_size**0.5 if value(c, "scale_embedding", False) else 1.0,
            tie_word_embeddings=value(c, "tie_word_embeddings", True),
            encoder=LayerArgs.from_config(c, "encoder", **sizes, norm_first=False),
            decoder=LayerArgs.from_config(c, "decoder", **sizes, norm_first=False),
        )


class BartSide(nn.Module):
    """What stands before the layers of encoder or decoder, and the layers."""

    def __init__(
        self, args: ModelArgs, embed_tokens: VocabEmbedding, layers: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.embed_positions = LearnedPositions(
            args.max_position_embeddings, args.hidden_size, FIRST_POSITION
        )
        self.layernorm_embedding = LayerNorm(args.hidden_size, NORM_EPS)
        self.layers = nn.ModuleList(layers)
        self.embed_scale = args.embed_scale

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → vectors without positions [T, hidden]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        return x if self.embed_scale == 1.0 else x.mul_(self.embed_scale)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, more: Any) -> torch.Tensor:
        """Vectors [T, hidden] at `positions` [T] → [T, hidden]; layers get `more`."""
        x = self.layernorm_embedding(x + self.embed_positions(positions))
        for layer in self.layers:
            x = layer(x, more)
        return x


class BartModel(nn.Module):
    """Both sides."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        vocab = (args.vocab_size, args.hidden_size)
        self.shared = VocabEmbedding(*vocab) if args.tie_word_embeddings else None
        self.encoder = BartSide(
            args,
            self.shared or VocabEmbedding(*vocab),
            (EncoderLayer(args.encoder) for _ in range(args.encoder.num_layers)),
        )
        self.decoder = BartSide(
            args,
            self.shared or VocabEmbedding(*vocab),
            (
                DecoderLayer(args.decoder, config, f"{prefix}decoder.layers.{i}")
                for i in range(args.decoder.num_layers)
            ),
        )


class LogitsBias(nn.Module):
    """A number for each token that is added to its logit."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = parameter(1, vocab_size)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The bias itself, [1, V]."""
        yield name, whole_parameter(self.bias)


class BartForConditionalGeneration(EncoderDecoder):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        super().__init__()
        args = ModelArgs.from_config(config.model_config.hf_config)
        self.model = BartModel(args, config, f"{prefix}model.")
        self.lm_head = LMHead(args.vocab_size, args.hidden_size, self.model.shared)
        self.final_logits_bias = LogitsBias(args.vocab_size)

    def encode(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """`input_ids` [n] of each text → its encoder outputs [n, hidden]."""
        texts = [item["input_ids"] for item in inputs]
        lengths = [len(text) for text in texts]
        ids = torch.cat(texts)
        positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])
        encoder = self.model.encoder
        out = encoder(encoder.embed_input_ids(ids), positions, whole_sequences(lengths, ids.device))
        return list(out.split(lengths))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [r, hidden] → logits [r, V]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.add_(self.final_logits_bias.bias)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from Hugging Face's names; see `models.weights.load_weights`.

        Of tied embeddings one is enough, whichever it is; the logits' bias may be missing.
        """
        used = load_weights(self, self._complete(weights), self._sanitize)
        return used

    def _complete(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        seen_embedding = seen_bias = False
        for name, tensor in with_zeros_for(weights, key_bias):
            own = self._sanitize(name)
            if own == _EMBEDDINGS[0]:
                if seen_embedding:
                    continue
                seen_embedding = True
            seen_bias = seen_bias or own == _BIAS
            yield name, tensor
        if not seen_bias:
            yield _BIAS, torch.zeros_like(self.final_logits_bias.bias)

    def _sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        if name != _BIAS and not name.startswith(("model.", "lm_head.")):
            name = f"model.{name}"
        if self.model.shared is None:
            return None if name == _EMBEDDINGS[0] else name
        if name.startswith("lm_head."):
            return None
        return _EMBEDDINGS[0] if name in _EMBEDDINGS else name
