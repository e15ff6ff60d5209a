"""What do the options of an encoder-decoder model become?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jubako.checkpoint.entries import value
from jubako.config import JubakoConfig
from jubako.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jubako.checkpoint.info import Checkpoint

_MODALITIES: dict[str, Literal["text", "audio"]] = {
    "BartForConditionalGeneration": "text",
    "WhisperForConditionalGeneration": "audio",
}
"""Architectures of encoder-decoder models → what their encoder reads."""


def with_encoder(config: JubakoConfig, checkpoint: Checkpoint, architecture: str) -> JubakoConfig:
    """`config` with what follows if the model is an encoder-decoder model; else as it is.

    Raises `ConfigError` for options that such models, or others, cannot honour.
    """
    scheduler = config.scheduler_config
    modality = _MODALITIES.get(architecture)
    if modality is None:
        for name in ("max_num_encoder_input_tokens", "encoder_cache_size"):
            if getattr(scheduler, name):
                raise ConfigError(
                    f"{name}={getattr(scheduler, name)} is for encoder-decoder models, which "
                    f"{architecture} is not; leave it at 0.",
                    name,
                )
        return config
    if config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching=True: the KV of {architecture} depends on the input of its "
            "encoder, and is never shared; leave it out.",
            "enable_prefix_caching",
        )
    if scheduler.long_prefill_token_threshold:
        raise ConfigError(
            f"long_prefill_token_threshold={scheduler.long_prefill_token_threshold}: prompts of "
            f"{architecture} are computed in one step; leave it at 0.",
            "long_prefill_token_threshold",
        )
    hf_config = checkpoint.hf_config
    length = _max_input_tokens(hf_config, modality)
    start = _token_id(hf_config, checkpoint.generation_config, "decoder_start_token_id")
    if start is None:
        raise CheckpointError(
            "config.json has no decoder_start_token_id, which an encoder-decoder model needs."
        )
    prompt = [start]
    forced = _token_id(hf_config, checkpoint.generation_config, "forced_bos_token_id")
    if forced is not None:
        prompt.append(forced)
    budget = scheduler.max_num_encoder_input_tokens or length
    room = scheduler.encoder_cache_size or budget
    for name, tokens in (("max_num_encoder_input_tokens", budget), ("encoder_cache_size", room)):
        if tokens < length:
            raise ConfigError(
                f"{name}={tokens} is less than the {length} tokens that the longest input of the "
                "encoder has; raise it, or leave it out.",
                name,
            )
    return config.replace(
        model_config={
            "supported_tasks": ("generate", "transcription")
            if modality == "audio"
            else ("generate",)
        },
        encoder_config={
            "modality": modality,
            "max_input_tokens": length,
            "num_mel_bins": value(hf_config, "num_mel_bins", 80) if modality == "audio" else 0,
            "num_frames": 2 * length if modality == "audio" else 0,
            "decoder_start_token_id": start,
            "default_decoder_prompt": tuple(prompt),
        },
        cache_config={"enable_prefix_caching": False},
        scheduler_config={
            # The encoder's output is turned into KV by one step, which runs the whole prompt.
            "enable_chunked_prefill": False,
            "max_num_encoder_input_tokens": budget,
            "encoder_cache_size": room,
        },
    )


def _max_input_tokens(hf_config: Mapping[str, Any], modality: str) -> int:
    default = ("max_source_positions", 1500)
    if modality == "text":
        default = ("max_position_embeddings", 1024)
    length: int = value(hf_config, *default)
    return length


def _token_id(
    hf_config: Mapping[str, Any], generation_config: Mapping[str, Any], name: str
) -> int | None:
    """A token id that either file may name; the one for generation goes first."""
    for file in (generation_config, hf_config):
        if file.get(name) is None:
            continue
        token: int = value(file, name, 0, least=0)
        vocab = hf_config.get("vocab_size")
        if isinstance(vocab, int) and token >= vocab:
            raise CheckpointError(
                f"{name}={token} must be a token id of the vocabulary, which has {vocab}."
            )
        return token
    return None
