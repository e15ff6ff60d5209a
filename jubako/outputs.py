"""What does a user get back for a request?"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Logprob(NamedTuple):
    """Log-probability of one token at one position.

    `logprob` is natural, from the unmodified logits; `rank` counts from 1, the most likely token.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id → logprob at one position: the chosen token first, then the best ones by rank."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the `n` answers to a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort", "error", or None while it is being written."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence and length."""
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


class RequestStateStats(msgspec.Struct, kw_only=True):
    """When what happened to a request. Times in seconds.

    `arrival_time` is wall clock; all others are the monotonic clock of the engine, and 0 until the
    event has happened.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """From arrival to the first token, measured in the front end."""
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    is_corrupted: bool = False


class RequestOutput(msgspec.Struct, kw_only=True):
    """The state of a request, as its output kind asks: all so far, only what is new, or the end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry a prompt token; the first is None."""
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found instead of computed, when the request first ran."""
    multi_modal_placeholders: dict[str, list[Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
