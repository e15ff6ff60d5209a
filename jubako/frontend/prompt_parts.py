"""What forms may a prompt have, and what is in it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

from jubako.errors import NotImplementedFeatureError, ValidationError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`.

For an encoder-decoder model a mapping with `encoder_prompt`, which is a prompt or, for one that
hears, `{"input_features": array}`, and perhaps `decoder_prompt` and `cache_salt`."""

_NOT_BUILT_KEYS = {
    "prompt_embeds": "Prompt embeddings",
    "multi_modal_data": "Multimodal inputs",
    "multi_modal_uuids": "Multimodal inputs",
    "mm_processor_kwargs": "Multimodal inputs",
}
_KNOWN_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class PromptParts(NamedTuple):
    """A prompt, taken apart; it has a text, or ids, or both."""

    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: object = None


def take_apart(prompt: object) -> PromptParts:
    """The parts of a prompt; `ValidationError` for what is none."""
    if isinstance(prompt, str):
        return PromptParts(prompt, None)
    if isinstance(prompt, Mapping):
        return _take_mapping_apart(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return PromptParts(None, prompt)
    raise ValidationError(
        "A prompt must be text, a list of token ids, or a mapping with prompt or "
        f"prompt_token_ids, got {type(prompt).__name__}.",
        "prompt",
    )


def _take_mapping_apart(prompt: Mapping[Any, Any]) -> PromptParts:
    for key, feature in _NOT_BUILT_KEYS.items():
        if prompt.get(key) is not None:
            raise NotImplementedFeatureError(f"{feature} are not built.", key)
    for key in ("encoder_prompt", "decoder_prompt"):
        if prompt.get(key) is not None:
            raise ValidationError(
                f"{key} is for encoder-decoder models, and this one has no encoder; give the text "
                "as prompt.",
                key,
            )
    unknown = [key for key in prompt if key not in _KNOWN_KEYS and key not in _NOT_BUILT_KEYS]
    if unknown:
        raise ValidationError(
            f"A prompt has no field {show(unknown[0])}; it may have prompt, prompt_token_ids "
            "and cache_salt.",
            "prompt",
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValidationError("A prompt needs prompt or prompt_token_ids.", "prompt")
    if text is not None and not isinstance(text, str):
        raise ValidationError(f"prompt must be text, got {type(text).__name__}.", "prompt", text)
    if ids is not None and (not isinstance(ids, Sequence) or isinstance(ids, str | bytes)):
        raise ValidationError(
            f"prompt_token_ids must be a list of token ids, got {type(ids).__name__}.",
            "prompt_token_ids",
            ids,
        )
    return PromptParts(text, ids, prompt.get("cache_salt"))


def as_token_ids(ids: Sequence[Any], parameter: str = "prompt") -> list[int]:
    """`ids` as a list of plain integers."""
    kinds = set(map(type, ids))
    if kinds <= {int}:
        return list(ids)
    result = []
    for value in ids:
        # NumPy's integers are as good; truth values and floats are mistakes.
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise ValidationError(
                f"{parameter} must be text or a list of integer token ids; it has a "
                f"{type(value).__name__}, {show(value)}.",
                parameter,
                value,
            )
        result.append(value.__index__())
    return result


def show(value: object) -> str:
    """A value as an error may quote it."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
