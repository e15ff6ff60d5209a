"""Is a request's input for the encoder one that the model can read?

Whoever sends a request makes its input here, and the core looks at it again: one of another shape
would stop a step, and with it everybody's requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jubako.config.encoder import EncoderConfig
from jubako.errors import ValidationError
from jubako.scheduler.features import MultiModalFeatureSpec, PlaceholderRange

PARAMETER = "encoder_prompt"


def text_feature(token_ids: list[int], identifier: str) -> MultiModalFeatureSpec:
    """The input of a model that reads text; `identifier` is unique to the request."""
    data = {"input_ids": np.array(token_ids, np.int32)}
    return MultiModalFeatureSpec(data, "text", identifier, PlaceholderRange(0, len(token_ids)))


def audio_feature(
    input_features: Any, identifier: str, config: EncoderConfig
) -> MultiModalFeatureSpec:
    """The input of a model that hears: a log-mel spectrogram [mels, frames] float32."""
    position = PlaceholderRange(0, config.max_input_tokens)
    return MultiModalFeatureSpec({"input_features": input_features}, "audio", identifier, position)


def encoder_token_ids(features: list[MultiModalFeatureSpec] | None) -> list[int] | None:
    """The ids that the encoder reads; None if it reads none."""
    if not features or features[0].modality != "text":
        return None
    ids: list[int] = features[0].data["input_ids"].tolist()
    return ids


def check_encoder_input(
    config: EncoderConfig, vocab_size: int, features: list[MultiModalFeatureSpec] | None
) -> None:
    """Raise `ValidationError` unless `features` are one input that the model can read."""
    if not config.is_encoder_decoder:
        if features:
            raise ValidationError(
                "This model has no encoder; leave the encoder's input out.", PARAMETER
            )
        return
    if features is None or len(features) != 1:
        raise ValidationError(
            f"A request of this model has one input for its encoder, {config.modality}; this one "
            f"has {len(features or ())}.",
            PARAMETER,
        )
    feature = features[0]
    if feature.modality != config.modality or not isinstance(feature.data, dict):
        raise ValidationError(
            f"The encoder of this model reads {config.modality}; the request has "
            f"{str(feature.modality)[:40]}.",
            PARAMETER,
        )
    length = feature.mm_position.length
    if config.modality == "audio":
        _check_spectrogram(config, feature.data.get("input_features"))
        fits = length == config.max_input_tokens
    else:
        ids: Any = feature.data.get("input_ids")
        _check_ids(config, vocab_size, ids)
        fits = length == len(ids)
    if not fits or feature.mm_position.offset != 0 or feature.mm_position.is_embed is not None:
        raise ValidationError("The encoder's input has a wrong length.", PARAMETER)


def too_long(config: EncoderConfig, what: str, value: int) -> ValidationError:
    """The error for a text of so many tokens or characters."""
    return ValidationError(
        f"The encoder prompt has {what}, but the encoder reads at most {config.max_input_tokens} "
        "tokens. Shorten it.",
        PARAMETER,
        value,
        code="context_length_exceeded",
    )


def _check_spectrogram(config: EncoderConfig, features: Any) -> None:
    shape = (config.num_mel_bins, config.num_frames)
    if not isinstance(features, np.ndarray) or features.dtype != np.float32:
        kind = getattr(features, "dtype", type(features).__name__)
        raise ValidationError(
            f"input_features must be a NumPy array of float32, got {kind}.", PARAMETER
        )
    if features.shape != shape:
        raise ValidationError(
            f"input_features must have shape {list(shape)}, mel bands and frames, got "
            f"{list(features.shape)}.",
            PARAMETER,
        )
    # What is no number spreads: it would be heard in every answer's tokens, not be refused.
    if not np.isfinite(features).all():
        raise ValidationError("input_features has values that are no finite numbers.", PARAMETER)


def _check_ids(config: EncoderConfig, vocab_size: int, ids: Any) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
        raise ValidationError("The encoder prompt must be a list of token ids.", PARAMETER)
    if not len(ids):
        raise ValidationError(
            "The encoder prompt is empty; it must have at least one token.", PARAMETER
        )
    if len(ids) > config.max_input_tokens:
        raise too_long(config, f"{len(ids)} tokens", len(ids))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValidationError(
            f"The encoder prompt has token id {low if low < 0 else high}; ids must be 0 to "
            f"{vocab_size - 1}.",
            PARAMETER,
        )
