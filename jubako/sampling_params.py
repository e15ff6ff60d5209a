"""How is one request to be sampled? The parameters, their limits, and their normal form."""

from __future__ import annotations

import math
import sys
from enum import IntEnum
from typing import Any, SupportsIndex

import msgspec

from jubako.errors import ValidationError

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy."""

MIN_TEMPERATURE = 0.01
"""Temperatures above zero are raised to this; below it a softmax in float32 overflows."""

MAX_LOGIT_BIAS = 100.0

MAX_INTEGER = 2**63 - 1
"""Larger numbers fit into no message and no tensor."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Logits are multiplied or divided by it; far beyond these limits float32 overflows."""

MAX_STRINGS = 1024
"""Most stop strings or bad words; each is looked for at every token, while others wait."""

_SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "skip_reading_prefix_cache",
)


class RequestOutputKind(IntEnum):
    """What each `RequestOutput` of a request carries."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new."""
    FINAL_ONLY = 2
    """One output, at the end."""


class SamplingType(IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """Constrains the output; exactly one of the first six fields is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class TranscriptionRules(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a speech model must not write, and in which order it writes times.

    Filled by the front end of transcriptions. Times are token ids from `first_timestamp` on, one
    every 0.02 s; None where no times are wanted.
    """

    end_token_id: int
    """Ids from here on are no text."""
    suppress_tokens: list[int] = []
    """Never written."""
    begin_suppress_tokens: list[int] = []
    """Not written as the first token."""
    first_timestamp: int | None = None


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sampling parameters of a request, with OpenAI's and vLLM's names and defaults.

    Values are checked at construction: a bad one raises `ValidationError` that names the field, the
    value and the limit. An object is never changed by the engine; it works on a `clone()`.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `min_p` 0 disable the filter. `logprobs` and
    `prompt_logprobs` are counts beside the chosen token; -1 is the whole vocabulary. `max_tokens`
    None means the rest of the context. Stop strings end the text before the match, unless
    `include_stop_str_in_output`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    """Filled by the input processor from `bad_words`."""
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    eos_token_ids: list[int] = []
    """Filled by the input processor: every id that ends a sequence of this model."""
    transcription: TranscriptionRules | None = None
    """Filled by the front end of transcriptions."""

    def __post_init__(self) -> None:
        self._normalise()
        self._verify()

    # -- construction -------------------------------------------------------------------------

    def _normalise(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.bad_words is None:
            self.bad_words = []
        if self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.skip_reading_prefix_cache is None:
            # Prompt logprobs need the logits of every prompt position, so nothing may be skipped.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _verify(self) -> None:
        self._check_int("n", self.n, 1, None)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_float(name, getattr(self, name), -2.0, 2.0)
        self._check_float(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )
        self._check_float("temperature", self.temperature, 0.0, sys.float_info.max)
        self._check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self._check_int("top_k", self.top_k, -1, None)
        self._check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self._check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            self._check_int("max_tokens", self.max_tokens, 1, None)
        self._check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, getattr(self, name), -1, None)
        if self.truncate_prompt_tokens is not None:
            self._check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
            if self.truncate_prompt_tokens == 0:
                raise self._error("truncate_prompt_tokens", 0, "at least 1, or -1 for the limit")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise self._error("output_kind", self.output_kind, "a RequestOutputKind")
        for name in _SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise self._error(name, getattr(self, name), "True or False")
        self._verify_lists()
        if 0 < self.temperature < MIN_TEMPERATURE and self.temperature >= GREEDY_EPSILON:
            self.temperature = MIN_TEMPERATURE
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _verify_lists(self) -> None:
        stop = self.stop
        if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
            raise self._error("stop", stop, "a string or a list of strings")
        if any(not s for s in stop):
            raise self._error("stop", stop, "without an empty string")
        if stop and not self.detokenize:
            raise ValidationError(
                "stop strings need detokenize=True; use stop_token_ids instead.", "stop", stop
            )
        ids = self.stop_token_ids
        if not isinstance(ids, list) or not all(_is_int(i) for i in ids):
            raise self._error("stop_token_ids", ids, "a list of token ids")
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not isinstance(allowed, list) or not all(_is_int(i) for i in allowed):
                raise self._error("allowed_token_ids", allowed, "a list of token ids")
            if not allowed:
                raise self._error("allowed_token_ids", [], "not empty")
        words = self.bad_words
        if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
            raise self._error("bad_words", words, "a list of strings")
        for name, strings in (("stop", stop), ("bad_words", words)):
            if len(strings) > MAX_STRINGS:
                raise self._error(name, len(strings), f"at most {MAX_STRINGS} strings")
        if not isinstance(self.extra_args, dict | None):
            raise self._error("extra_args", self.extra_args, "a dict")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise self._error("logit_bias", self.logit_bias, "a map from token id to number")
            bias: dict[int, float] = {}
            for key, value in self.logit_bias.items():
                try:
                    number = float(value)
                    token = _token_id(key)
                except (TypeError, ValueError, OverflowError):
                    raise self._error(
                        "logit_bias", {key: value}, "a map from token id to number"
                    ) from None
                if math.isnan(number):
                    raise self._error("logit_bias", {key: value}, "a number")
                bias[token] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, number))
            self.logit_bias = bias

    @staticmethod
    def _error(name: str, value: object, wanted: str) -> ValidationError:
        try:
            shown = repr(value)
        except ValueError:
            shown = "a number of thousands of digits"
        if len(shown) > 100:
            shown = shown[:100] + "..."
        return ValidationError(f"{name} must be {wanted}, got {shown}.", name, value)

    def _check_int(self, name: str, value: object, low: int, high: int | None) -> None:
        wanted = f"an integer of at least {low}"
        high = MAX_INTEGER if high is None else high
        if high != MAX_INTEGER or (_is_int(value) and value > high):  # type: ignore[operator]
            wanted += f" and at most {high}"
        if not _is_int(value) or not low <= value <= high:  # type: ignore[operator]
            raise self._error(name, value, wanted)

    def _check_float(
        self, name: str, value: object, low: float, high: float, open_low: bool = False
    ) -> None:
        wanted = f"a number {'above' if open_low else 'of at least'} {low} and at most {high}"
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self._error(name, value, wanted)
        if value < low or (open_low and value == low) or value > high:
            raise self._error(name, value, wanted)

    # -- views --------------------------------------------------------------------------------

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPSILON

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with the request's own seed."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def stop_strings(self) -> list[str]:
        """`stop` in its normal form, a list."""
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def stop_ids(self) -> list[int]:
        """`stop_token_ids` in its normal form, a list."""
        assert self.stop_token_ids is not None
        return self.stop_token_ids

    @property
    def output_text_buffer_length(self) -> int:
        """Characters that may be the beginning of a stop string, and so must be held back."""
        if self.include_stop_str_in_output or not self.stop:
            return 0
        return max(len(s) for s in self.stop_strings) - 1

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every id that could end the sequence, end-of-sequence ids included even if ignored."""
        return {*self.stop_ids, *self.eos_token_ids}

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with private lists, and with `changes` applied and checked again."""
        values: dict[str, Any] = {}
        for name in self.__struct_fields__:
            value = changes.get(name, getattr(self, name))
            values[name] = value.copy() if isinstance(value, list | dict) else value
        return SamplingParams(**values)


def _token_id(key: object) -> int:
    """The id that a key of `logit_bias` stands for; in JSON keys are strings."""
    if isinstance(key, str):
        if not key.isascii() or not key.removeprefix("-").isdigit():
            raise ValueError("not a number")
        return int(key)
    if isinstance(key, bool) or not isinstance(key, SupportsIndex):
        raise TypeError("not an integer")
    return key.__index__()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Parameters of a request that wants vectors or scores instead of text."""

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
