"""What does the encoder of an encoder-decoder model take?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types


@dataclass(frozen=True)
class EncoderConfig:
    """Filled when the checkpoint has been read (`engine.encoder_setup`); no options."""

    modality: Literal["none", "text", "audio"] = "none"
    """What a request's encoder input is; "none": the model has no encoder beside its decoder."""
    max_input_tokens: int = 0
    """The longest encoder output. That of audio always has this length."""
    num_mel_bins: int = 0
    """Rows of the spectrogram that audio comes as."""
    num_frames: int = 0
    """Its columns."""
    decoder_start_token_id: int = 0
    """The token that a decoder prompt begins with."""
    default_decoder_prompt: tuple[int, ...] = ()
    """The decoder prompt of a request that has none."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether requests have an input for an encoder."""
        return self.modality != "none"
