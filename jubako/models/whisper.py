"""Whisper (Radford et al. 2022, arXiv 2212.04356): speech in, text out.

Two convolutions make one vector of two frames of a log-mel spectrogram, which always stands for 30
seconds. Norms stand before attention and MLP, and one behind the layers. Embeddings are used as
they are, whatever config.json says of `scale_embedding`: no Whisper model was trained otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    num_mel_bins: int
    max_source_positions: int
    max_target_positions: int
    tie_word_embeddings: bool
    encoder: LayerArgs
    decoder: LayerArgs

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Whisper model."""
        sizes: dict[str, Any] = {"layers": 4, "heads": 6, "ffn": 1536, "size": 384}
        hidden_size = value(c, "d_model", 384)
        return cls(
            vocab_size=value(c, "vocab_size", 51_865),
            hidden_size=hidden_size,
            num_mel_bins=value(c, "num_mel_bins", 80),
            max_source_positions=value(c, "max_source_positions", 1500),
            max_target_positions=value(c, "max_target_positions", 448),
            tie_word_embeddings=value(c, "tie_word_embeddings", True),
            encoder=LayerArgs.from_config(c, "encoder", **sizes, norm_first=True),
            decoder=LayerArgs.from_config(c, "decoder", **sizes, norm_first=True),
        )


class Conv1d(nn.Module):
    """A convolution over 3 neighbours, with zeros before the first and behind the last."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.weight = parameter(out_channels, in_channels, 3)
        self.bias = parameter(out_channels)
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in, L] → [n, out, ⌈L / stride⌉]."""
        return F.conv1d(x, self.weight, self.bias, stride=self.stride, padding=1)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight` and `bias`."""
        yield f"{name}.weight", whole_parameter(self.weight)
        yield f"{name}.bias", whole_parameter(self.bias)


class WhisperEncoder(nn.Module):
    """Convolutions, positions, layers and the last norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.conv1 = Conv1d(args.num_mel_bins, args.hidden_size, 1)
        self.conv2 = Conv1d(args.hidden_size, args.hidden_size, 2)
        self.embed_positions = LearnedPositions(args.max_source_positions, args.hidden_size)
        self.layers = nn.ModuleList(
            EncoderLayer(args.encoder) for _ in range(args.encoder.num_layers)
        )
        self.layer_norm = LayerNorm(args.hidden_size, NORM_EPS)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Log-mel spectrograms [n, mels, 2 · positions] → [n, positions, hidden]."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(features.to(self.conv1.weight.dtype)))))
        x = x.transpose(1, 2) + self.embed_positions.all()
        n, length = x.shape[:2]
        sequences = whole_sequences([length] * n, x.device)
        x = x.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, sequences)
        return self.layer_norm(x).unflatten(0, (n, length))


class WhisperDecoder(nn.Module):
    """Embeddings with learned positions, layers and the last norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        self.embed_positions = LearnedPositions(args.max_target_positions, args.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(args.decoder, config, f"{prefix}.layers.{i}")
            for i in range(args.decoder.num_layers)
        )
        self.layer_norm = LayerNorm(args.hidden_size, NORM_EPS)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → vectors without positions [T, hidden]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        return x

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, encoded: torch.Tensor | None
    ) -> torch.Tensor:
        """Vectors [T, hidden] at `positions` [T], new encoder outputs [E, hidden] → [T, hidden]."""
        x = x + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, encoded)
        out: torch.Tensor = self.layer_norm(x)
        return out


class WhisperModel(nn.Module):
    """Both sides."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        self.encoder = WhisperEncoder(args)
        self.decoder = WhisperDecoder(args, config, f"{prefix}decoder")


class WhisperForConditionalGeneration(EncoderDecoder):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        super().__init__()
        args = ModelArgs.from_config(config.model_config.hf_config)
        self.model = WhisperModel(args, config, f"{prefix}model.")
        tied_to = self.model.decoder.embed_tokens if args.tie_word_embeddings else None
        self.proj_out = LMHead(args.vocab_size, args.hidden_size, tied_to)

    def encode(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """`input_features` [mels, 2 · positions] of each → its outputs [positions, hidden]."""
        out: torch.Tensor = self.model.encoder(
            torch.stack([item["input_features"] for item in inputs])
        )
        return list(out)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [r, hidden] → logits [r, V]."""
        logits: torch.Tensor = self.proj_out(hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from Hugging Face's names; see `models.weights.load_weights`.

        Biases of keys may be missing: they are 0.
        """
        return load_weights(self, with_zeros_for(weights, key_bias), self._sanitize)

    def _sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        if name.startswith("proj_out."):
            return None if self.proj_out.tied else name
        return name if name.startswith("model.") else f"model.{name}"
