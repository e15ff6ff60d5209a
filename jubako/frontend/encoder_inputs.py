"""What is in a prompt for an encoder-decoder model: what the encoder reads, and what the decoder
begins with?

`{"encoder_prompt": ..., "decoder_prompt": ...}` has both. A prompt without these names is the
encoder's of a model that reads text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jubako.config.encoder import EncoderConfig
from jubako.errors import ValidationError
from jubako.multimodal.audio.log_mel import log_mel_features
from jubako.multimodal.audio.resample import to_mono

_BOTH = ("encoder_prompt", "decoder_prompt")
_FEATURES = "input_features"
_MEDIA = "multi_modal_data"
_TEXT_FORM = 'a text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'
_AUDIO_FORM = '{"input_features": array} or {"multi_modal_data": {"audio": (samples, rate)}}'


class EncoderDecoderParts(NamedTuple):
    """A prompt, taken apart."""

    encoder: Any
    """Of a model that reads text a prompt, of one that hears the spectrogram."""
    decoder: Any
    """A prompt, or None."""
    cache_salt: object = None


def is_for_encoder(prompt: object) -> bool:
    """Whether a prompt is written in the form for encoder-decoder models."""
    return isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in _BOTH)


def take_encoder_apart(prompt: object, config: EncoderConfig) -> EncoderDecoderParts:
    """The two sides of a prompt; `ValidationError` for one of another form.

    What stands in them is checked by whoever reads it.
    """
    if config.modality == "audio" and isinstance(prompt, Mapping) and _MEDIA in prompt:
        # The form of models whose prompts media stand in: what else there is is the decoder's.
        rest = {key: value for key, value in prompt.items() if key not in (_MEDIA, "cache_salt")}
        media = {_MEDIA: prompt[_MEDIA]}
        return EncoderDecoderParts(
            _spectrogram(media, config), rest or None, prompt.get("cache_salt")
        )
    if not is_for_encoder(prompt):
        if config.modality == "audio":
            raise ValidationError(
                f'This model hears audio: the prompt must be {{"encoder_prompt": {_AUDIO_FORM}, '
                '"decoder_prompt": ...}.',
                "prompt",
            )
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        return EncoderDecoderParts(prompt, None, salt)
    assert isinstance(prompt, Mapping)
    unknown = [key for key in prompt if key not in (*_BOTH, "cache_salt")]
    if unknown:
        raise ValidationError(
            f"A prompt with encoder_prompt and decoder_prompt may have cache_salt besides; it has "
            f"{str(unknown[0])[:40]!r}.",
            "prompt",
        )
    encoder = prompt.get("encoder_prompt")
    form = _AUDIO_FORM if config.modality == "audio" else _TEXT_FORM
    if encoder is None:
        raise ValidationError(
            f"The prompt has no encoder_prompt, which must be {form}.", "encoder_prompt"
        )
    has_audio = isinstance(encoder, Mapping) and (_FEATURES in encoder or _MEDIA in encoder)
    if has_audio != (config.modality == "audio"):
        raise ValidationError(
            f"The encoder of this model reads {config.modality}: encoder_prompt must be {form}.",
            "encoder_prompt",
        )
    if has_audio:
        encoder = _spectrogram(encoder, config)
    return EncoderDecoderParts(encoder, prompt.get("decoder_prompt"), prompt.get("cache_salt"))


def _spectrogram(given: Mapping[Any, Any], config: EncoderConfig) -> Any:
    """What an encoder that hears is to read; an empty text may stand beside it."""
    names = [key for key in given if key != "prompt" or given[key]]
    if names == [_FEATURES]:
        return given[_FEATURES]
    if names != [_MEDIA]:
        raise ValidationError(
            f"The encoder's prompt must be {_AUDIO_FORM}, and nothing else.", "encoder_prompt"
        )
    media = given[_MEDIA]
    audio: Any = None
    if isinstance(media, Mapping) and len(media) == 1:
        audio = media.get("audio")
    is_pair = isinstance(audio, tuple) and len(audio) == 2
    if not is_pair or not isinstance(audio[0], np.ndarray) or type(audio[1]) is not int:
        raise ValidationError(
            'multi_modal_data must be {"audio": (samples, rate)}: a NumPy array of samples and '
            "an integer.",
            _MEDIA,
        )
    return log_mel_features(to_mono(audio[0], audio[1]), config.num_mel_bins)


def begun(token_ids: Sequence[int], config: EncoderConfig) -> list[int]:
    """A decoder prompt with the token that it must begin with; it is put in front if it is missing.

    A model that hears may have earlier text before that token.
    """
    start = config.decoder_start_token_id
    has_start = token_ids[:1] == [start] or (config.modality == "audio" and start in token_ids)
    return [*token_ids] if has_start else [start, *token_ids]
