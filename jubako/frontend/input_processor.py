"""Is a request fit to be run, and what exactly is it that the core gets?

Everything that a caller can get wrong is said here, one clear `ValidationError` for each, before
the request costs the core anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jubako.config import JubakoConfig
from jubako.engine.encoder_input import audio_feature, check_encoder_input, text_feature, too_long
from jubako.engine.messages import EngineCoreReady, EngineCoreRequest
from jubako.errors import NotImplementedFeatureError, ValidationError
from jubako.frontend.encoder_inputs import begun, take_encoder_apart
from jubako.frontend.pooling_input import complete_pooling_params
from jubako.frontend.prompt_parts import Prompt, PromptParts, as_token_ids, show, take_apart
from jubako.frontend.tokenizer import LONG_TEXT, Tokenizer
from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler.features import MultiModalFeatureSpec
from jubako.structured_output.grammars import checked, is_large

MAX_N = 1024
"""Most answers to one request; each is a request of its own inside."""


class ProcessedInput(NamedTuple):
    """A request for the core, and the text of its prompt if there was one."""

    request: EngineCoreRequest
    prompt: str | None
    encoder_prompt: str | None = None


class InputProcessor:
    """Turns prompts and parameters into `EngineCoreRequest`s. Thread-safe.

    `tokenizer` is None for a model that takes and gives token ids only.
    """

    def __init__(
        self, config: JubakoConfig, ready: EngineCoreReady, tokenizer: Tokenizer | None
    ) -> None:
        self._config = config
        self._encoder = config.encoder_config
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
                f"request_id must be a non-empty string, got {show(request_id)}.", "request_id"
            )
        if lora_request is not None:
            raise NotImplementedFeatureError("LoRA adapters are not built.", "lora_request")
        self._check_kind(params)
        if isinstance(params, SamplingParams):
            self._check_params(params)
        self._check_priority(priority)
        if data_parallel_rank not in (None, 0):
            raise ValidationError(
                f"data_parallel_rank must be 0, got {show(data_parallel_rank)}.",
                "data_parallel_rank",
                data_parallel_rank,
            )
        encoder: PromptParts | None = None
        features = None
        if self._encoder.is_encoder_decoder:
            parts, encoder, features = self._both_sides(prompt, params, request_id)
        else:
            parts = take_apart(prompt)
        salt = parts.cache_salt if cache_salt is None else cache_salt
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValidationError(
                f"cache_salt must be a non-empty string, got {show(salt)}.", "cache_salt", salt
            )
        sampling = pooling = None
        if isinstance(params, PoolingParams):
            pooling = complete_pooling_params(self._config, params)
            token_ids = self.encode_prompt(prompt, pooling.truncate_prompt_tokens)
        else:
            # What is cut of two prompts is the encoder's, which is the longer.
            keep = params.truncate_prompt_tokens if features is None else None
            token_ids = self._token_ids(parts, keep)
            sampling = self._complete(params, len(token_ids))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            mm_features=features,
            sampling_params=sampling,
            pooling_params=pooling,
            eos_token_id=self._eos_token_id,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            cache_salt=salt,
            priority=priority,
            trace_headers=trace_headers,
        )
        return ProcessedInput(request, parts.text, None if encoder is None else encoder.text)

    def takes_long(
        self, prompt: Prompt, params: SamplingParams | PoolingParams | None = None
    ) -> bool:
        """Whether processing is worth a thread: there is much text to encode, or a large form of
        the output to look at."""
        if isinstance(params, SamplingParams) and is_large(params.structured_outputs):
            return True
        if isinstance(prompt, Mapping) and prompt.get("encoder_prompt") is not None:
            prompt = prompt["encoder_prompt"]
        if isinstance(prompt, Mapping):
            if "input_features" in prompt or "multi_modal_data" in prompt:
                return True
            if prompt.get("prompt_token_ids") is not None:
                return False
            prompt = prompt.get("prompt", "")
        return isinstance(prompt, str) and len(prompt) > LONG_TEXT

    # -- prompt -------------------------------------------------------------------------------

    def _both_sides(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, request_id: str
    ) -> tuple[PromptParts, PromptParts, list[MultiModalFeatureSpec]]:
        """The decoder's prompt as token ids, the encoder's, and that as the model reads it."""
        config = self._encoder
        sides = take_encoder_apart(prompt, config)
        if config.modality == "audio":
            encoder = PromptParts(None, None)
            feature = audio_feature(sides.encoder, request_id, config)
        else:
            encoder = take_apart(sides.encoder)
            feature = text_feature(self._encoder_ids(encoder, params), request_id)
        check_encoder_input(config, self._vocab_size, [feature])
        decoder = PromptParts(None, config.default_decoder_prompt, sides.cache_salt)
        if sides.decoder is not None:
            decoder = take_apart(sides.decoder)
            ids = self._ids_of(decoder, truncated=False, special=False)
            decoder = PromptParts(decoder.text, begun(ids, config), sides.cache_salt)
        return decoder, encoder, [feature]

    def _encoder_ids(self, parts: PromptParts, params: SamplingParams | PoolingParams) -> list[int]:
        longest, keep = self._encoder.max_input_tokens, params.truncate_prompt_tokens
        size, tokenizer = len(parts.text or ""), self._tokenizer
        is_text = parts.token_ids is None and keep is None
        if is_text and tokenizer is not None and tokenizer.cannot_fit(size, longest):
            raise too_long(self._encoder, f"{size} characters", size)
        ids = self._ids_of(parts, truncated=True)
        if keep is not None:
            ids = ids[-(longest if keep == -1 else keep) :]
        # Else NumPy would refuse them in its own words.
        self._check_token_ids("encoder_prompt", ids)
        return ids

    def _ids_of(self, parts: PromptParts, *, truncated: bool, special: bool = True) -> list[int]:
        if parts.token_ids is not None:
            return as_token_ids(parts.token_ids)
        # Special tokens that the tokeniser adds do not make an empty prompt a prompt.
        if not parts.text:
            return []
        return self._encode(parts.text, truncated=truncated, special=special)

    def _token_ids(self, parts: PromptParts, keep: int | None) -> list[int]:
        ids = self._ids_of(parts, truncated=keep is not None)
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
        parts = take_apart(prompt)
        keep = self._check_truncation(truncate_prompt_tokens)
        if parts.token_ids is not None:
            ids = as_token_ids(parts.token_ids)[:keep]
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
                f"{show(keep)}.",
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
            self._check_constrained(params)
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
                self._check_token_ids(name, as_token_ids(list(ids), name))
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValidationError(f"{name} needs a tokenizer; this engine has none.", name)

    def _check_constrained(self, params: SamplingParams) -> None:
        """Refuse parameters that leave a grammar no token to go on with."""
        if self._tokenizer is None:
            raise ValidationError(
                "structured_outputs needs a tokenizer; this engine has none.", "structured_outputs"
            )
        for name in ("min_tokens", "allowed_token_ids"):
            if getattr(params, name):
                raise ValidationError(
                    f"{name} cannot be combined with structured_outputs, which says alone which "
                    "tokens may come and when the output is complete. Leave one of them out.",
                    name,
                )

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
                f"priority must be an integer, got {show(priority)}.", "priority", priority
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
        form = params.structured_outputs
        return params.clone(
            structured_outputs=None if form is None else checked(form),
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
                    f"bad_words must be non-empty strings, got {show(word)}.", "bad_words", word
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
