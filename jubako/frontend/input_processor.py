"""Is a request fit to be run, and what exactly is it that the core gets?

Everything that a caller can get wrong is said here, one clear `ValidationError` for each, before
the request costs the core anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

from jubako.config import JubakoConfig
from jubako.engine.messages import EngineCoreReady, EngineCoreRequest
from jubako.errors import NotImplementedFeatureError, ValidationError
from jubako.frontend.pooling_input import complete_pooling_params
from jubako.frontend.tokenizer import LONG_TEXT, Tokenizer
from jubako.sampling_params import PoolingParams, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`."""

MAX_N = 1024
"""Most answers to one request; each is a request of its own inside."""

_NOT_BUILT_KEYS = {
    "prompt_embeds": "Prompt embeddings",
    "multi_modal_data": "Multimodal inputs",
    "multi_modal_uuids": "Multimodal inputs",
    "mm_processor_kwargs": "Multimodal inputs",
    "encoder_prompt": "Encoder-decoder models",
    "decoder_prompt": "Encoder-decoder models",
}
_KNOWN_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class ProcessedInput(NamedTuple):
    """A request for the core, and the text of its prompt if there was one."""

    request: EngineCoreRequest
    prompt: str | None


class InputProcessor:
    """Turns prompts and parameters into `EngineCoreRequest`s. Thread-safe.

    `tokenizer` is None for a model that takes and gives token ids only.
    """

    def __init__(
        self, config: JubakoConfig, ready: EngineCoreReady, tokenizer: Tokenizer | None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = ready.max_model_len
        self._vocab_size = ready.vocab_size
        self._max_logprobs = config.model_config.max_logprobs
        self._has_priorities = ready.scheduling_policy == "priority"
        ends = list(config.model_config.eos_token_ids)
        first = tokenizer.eos_token_id if tokenizer is not None else None
        if first is None and ends:
            first = ends[0]
        self._eos_token_id = first
        self._further_eos_ids = [i for i in dict.fromkeys(ends) if i != first]

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        lora_request: object = None,
        data_parallel_rank: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> ProcessedInput:
        """The checked request, with `request_id` still the caller's (see `assign_request_id`).

        The caller's `params` are not changed. Raises `ValidationError` for what is wrong, and
        `NotImplementedFeatureError` for what is known but not built.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValidationError(
                f"request_id must be a non-empty string, got {_show(request_id)}.", "request_id"
            )
        if lora_request is not None:
            raise NotImplementedFeatureError("LoRA adapters are not built.", "lora_request")
        self._check_kind(params)
        if isinstance(params, SamplingParams):
            self._check_params(params)
        self._check_priority(priority)
        if data_parallel_rank not in (None, 0):
            raise ValidationError(
                f"data_parallel_rank must be 0, got {_show(data_parallel_rank)}.",
                "data_parallel_rank",
                data_parallel_rank,
            )
        parts = _take_apart(prompt)
        salt = parts.cache_salt if cache_salt is None else cache_salt
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValidationError(
                f"cache_salt must be a non-empty string, got {_show(salt)}.", "cache_salt", salt
            )
        sampling = pooling = None
        if isinstance(params, PoolingParams):
            pooling = complete_pooling_params(self._config, params)
            token_ids = self.encode_prompt(prompt, pooling.truncate_prompt_tokens)
        else:
            token_ids = self._token_ids(parts, params)
            sampling = self._complete(params, len(token_ids))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=pooling,
            eos_token_id=self._eos_token_id,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            cache_salt=salt,
            priority=priority,
            trace_headers=trace_headers,
        )
        return ProcessedInput(request, parts.text)

    def takes_long(self, prompt: Prompt) -> bool:
        """Whether processing `prompt` is worth a thread, because it has much text to encode."""
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                return False
            prompt = prompt.get("prompt", "")
        return isinstance(prompt, str) and len(prompt) > LONG_TEXT

    # -- prompt -------------------------------------------------------------------------------

    def _token_ids(self, parts: _PromptParts, params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if parts.token_ids is not None:
            ids = _as_token_ids(parts.token_ids)
        else:
            assert parts.text is not None
            # Special tokens that the tokeniser adds do not make an empty prompt a prompt.
            ids = self._encode(parts.text, truncated=keep is not None) if parts.text else []
        if not ids:
            raise ValidationError(
                "The prompt is empty; it must have at least one token.", "prompt", ""
            )
        longest = self._max_model_len - 1
        if keep is not None:
            ids = ids[-(longest if keep == -1 else keep) :]
        if len(ids) > longest:
            raise self._too_long(f"has {len(ids)} tokens", len(ids))
        self._check_token_ids("prompt", ids)
        return ids

    def encode_prompt(
        self,
        prompt: Prompt,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """The token ids of a prompt to pool, which may be as long as the context.

        Truncation keeps the beginning, and the special tokens at the end.
        """
        parts = _take_apart(prompt)
        keep = self._check_truncation(truncate_prompt_tokens)
        if parts.token_ids is not None:
            ids = _as_token_ids(parts.token_ids)[:keep]
        else:
            text = parts.text or ""
            if self._config.pooler_config.lower_case:
                text = text.lower()
            ids = []
            if text:
                ids = self._encode(text, truncated=keep is not None, special=add_special_tokens)
            if keep is not None and len(ids) > keep and add_special_tokens:
                assert self._tokenizer is not None
                ids, _ = self._tokenizer.encode_pair(text, None, keep)
            ids = ids[:keep]
        if not ids:
            raise ValidationError(
                "The prompt is empty; it must have at least one token.", "prompt", ""
            )
        if len(ids) > self._max_model_len:
            raise ValidationError(
                f"The prompt has {len(ids)} tokens, but the context holds {self._max_model_len}. "
                "Shorten it, or set truncate_prompt_tokens=-1.",
                "prompt",
                len(ids),
                code="context_length_exceeded",
            )
        self._check_token_ids("prompt", ids)
        return ids

    def _check_truncation(self, keep: object) -> int | None:
        """How many tokens of a prompt to keep."""
        if keep is None:
            return None
        if type(keep) is not int or not (keep == -1 or 1 <= keep <= self._max_model_len):
            raise ValidationError(
                f"truncate_prompt_tokens must be -1, or 1 to {self._max_model_len}, got "
                f"{_show(keep)}.",
                "truncate_prompt_tokens",
                keep,
            )
        return self._max_model_len if keep == -1 else keep

    def encode_pair(
        self, first: str, second: str, truncate_prompt_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """Token ids of two texts as one prompt, and where the second segment begins, if anywhere.

        Truncation shortens the longer of the two first.
        """
        if self._tokenizer is None:
            raise ValidationError("This engine has no tokenizer, so it cannot score texts.")
        keep = self._check_truncation(truncate_prompt_tokens)
        for text in (first, second):
            if keep is None and self._tokenizer.cannot_fit(len(text), self._max_model_len):
                raise self._too_long(f"has a text of {len(text)} characters", len(text))
        if self._config.pooler_config.lower_case:
            first, second = first.lower(), second.lower()
        return self._tokenizer.encode_pair(first, second, keep)

    def _encode(self, text: str, *, truncated: bool, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise ValidationError(
                "This engine has no tokenizer; give prompt_token_ids instead of text.", "prompt"
            )
        if not truncated and self._tokenizer.cannot_fit(len(text), self._max_model_len):
            raise self._too_long(f"has {len(text)} characters", len(text))
        try:
            return self._tokenizer.encode(text, add_special_tokens=special)
        except ValidationError as error:
            error.parameter = "prompt"
            raise

    def _too_long(self, what: str, value: int) -> ValidationError:
        return ValidationError(
            f"The prompt {what}, but the context holds {self._max_model_len} tokens, prompt and "
            f"output together: at most {self._max_model_len - 1} for the prompt. Shorten it.",
            "prompt",
            value,
            code="context_length_exceeded",
        )

    def _check_token_ids(self, parameter: str, ids: Iterable[int]) -> None:
        values = ids if isinstance(ids, list) else list(ids)
        if not values:
            return
        low, high = min(values), max(values)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            # A number of thousands of digits cannot even be written.
            shown = str(bad) if abs(bad) < 2**200 else "of many digits"
            raise ValidationError(
                f"{parameter} has token id {shown}, which is not in the vocabulary of "
                f"{self._vocab_size}: ids must be 0 to {self._vocab_size - 1}.",
                parameter,
                bad,
            )

    # -- parameters ---------------------------------------------------------------------------

    def _check_kind(self, params: object) -> None:
        """Refuse parameters of a kind that the model has no use for."""
        pools = self._config.model_config.pools
        if not isinstance(params, PoolingParams if pools else SamplingParams):
            if isinstance(params, SamplingParams):
                raise ValidationError(
                    "This model makes vectors or scores and writes no text; it supports "
                    f"{', '.join(self._config.model_config.supported_tasks)}.",
                    "sampling_params",
                    code="unsupported_task",
                )
            if isinstance(params, PoolingParams):
                raise ValidationError(
                    "This model writes text; start the engine with runner=pooling to have "
                    "embeddings of it.",
                    "pooling_params",
                    code="unsupported_task",
                )
            wanted = "a PoolingParams" if pools else "a SamplingParams"
            name = "pooling_params" if pools else "sampling_params"
            raise ValidationError(f"{name} must be {wanted}, got {type(params).__name__}.", name)

    def _check_params(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            raise NotImplementedFeatureError(
                "Structured outputs are not built.", "structured_outputs"
            )
        if params.n > MAX_N:
            raise ValidationError(f"n must be at most {MAX_N}, got {params.n}.", "n", params.n)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids:
                self._check_token_ids(name, _as_token_ids(list(ids), name))
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValidationError(f"{name} needs a tokenizer; this engine has none.", name)

    def _check_logprobs(self, name: str, count: int | None) -> None:
        if count is None or self._max_logprobs == -1:
            return
        wanted = self._vocab_size if count == -1 else count
        if wanted > self._max_logprobs:
            shown = f"{count} ({wanted}, the whole vocabulary)" if count == -1 else str(count)
            raise ValidationError(
                f"{name} must be at most {self._max_logprobs}, got {shown}; the engine's "
                "max_logprobs sets the limit.",
                name,
                count,
            )

    def _check_priority(self, priority: object) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValidationError(
                f"priority must be an integer, got {_show(priority)}.", "priority", priority
            )
        if priority != 0 and not self._has_priorities:
            raise ValidationError(
                f"priority must be 0, got {priority}; start the engine with "
                "scheduling_policy=priority to use others.",
                "priority",
                priority,
            )
        if not -(2**63) <= priority < 2**63:
            raise ValidationError("priority must fit 64 bits.", "priority", priority)

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A private copy with what the model and the prompt decide."""
        room = self._max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = list(params.stop_ids)
        if not params.ignore_eos:
            stop_ids += [i for i in self._further_eos_ids if i not in stop_ids]
        ends = self._further_eos_ids
        if self._eos_token_id is not None:
            ends = [self._eos_token_id, *ends]
        return params.clone(
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            stop_token_ids=stop_ids,
            eos_token_ids=list(ends),
            bad_words_token_ids=self._encode_bad_words(params.bad_words or []),
        )

    def _encode_bad_words(self, words: Sequence[str]) -> list[list[int]] | None:
        """Each word as it is written at a beginning, and after a space."""
        if not words:
            return None
        assert self._tokenizer is not None
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise ValidationError(
                    f"bad_words must be non-empty strings, got {_show(word)}.", "bad_words", word
                )
            for text in (word.lstrip(" "), " " + word.lstrip(" ")):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                self._check_token_ids("bad_words", ids)
                if ids:
                    found[tuple(ids)] = None
        return [list(ids) for ids in found]


def assign_request_id(request: EngineCoreRequest) -> str:
    """Give `request` an id of its own, so that callers may repeat theirs; returns it.

    The caller's id stays in `external_req_id`.
    """
    assert request.external_req_id is None, "the request has an internal id already"
    request.external_req_id = request.request_id
    request.request_id = f"{request.request_id}-{os.urandom(4).hex()}"
    return request.request_id


class _PromptParts(NamedTuple):
    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: object = None


def _take_apart(prompt: object) -> _PromptParts:
    if isinstance(prompt, str):
        return _PromptParts(prompt, None)
    if isinstance(prompt, Mapping):
        return _take_mapping_apart(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return _PromptParts(None, prompt)
    raise ValidationError(
        "A prompt must be text, a list of token ids, or a mapping with prompt or "
        f"prompt_token_ids, got {type(prompt).__name__}.",
        "prompt",
    )


def _take_mapping_apart(prompt: Mapping[Any, Any]) -> _PromptParts:
    for key, feature in _NOT_BUILT_KEYS.items():
        if prompt.get(key) is not None:
            raise NotImplementedFeatureError(f"{feature} are not built.", key)
    unknown = [key for key in prompt if key not in _KNOWN_KEYS and key not in _NOT_BUILT_KEYS]
    if unknown:
        raise ValidationError(
            f"A prompt has no field {_show(unknown[0])}; it may have prompt, prompt_token_ids "
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
    return _PromptParts(text, ids, prompt.get("cache_salt"))


def _as_token_ids(ids: Sequence[Any], parameter: str = "prompt") -> list[int]:
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
                f"{type(value).__name__}, {_show(value)}.",
                parameter,
                value,
            )
        result.append(value.__index__())
    return result


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
