"""What does the engine core tell a front end after a step?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from jubako.kv_cache.metrics import KVCacheEvictionEvent, PrefixCacheStats
from jubako.scheduler.model_output import LogprobsLists


class FinishReason(IntEnum):
    """Why a request ended. `str()` gives the word of the HTTP interface."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(IntEnum):
    """Stations of a request inside the core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True):
    """When a request reached a station; monotonic seconds."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new(cls, type: EngineCoreEventType, timestamp: float | None = None) -> EngineCoreEvent:
        """An event that happens now, unless a time is given."""
        return cls(type, time.monotonic() if timestamp is None else timestamp)


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one request produced in a step."""

    request_id: str
    new_token_ids: list[int]
    """Trimmed at the stop token, which is included."""
    num_cached_tokens: int = 0
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsLists | None = None
    """All prompt positions but the first."""
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id; None for end-of-sequence and length."""
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    num_external_computed_tokens: int = 0
    num_nans_in_logits: int = 0
    error: str | None = None
    """With `FinishReason.ERROR`: what to tell the caller, fit for a client to read."""

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class SpecDecodingStats(msgspec.Struct, kw_only=True):
    """Drafts that were verified since the last report; what a grammar refused is left out."""

    num_spec_tokens: int = 0
    """Most drafts that one request brought."""
    num_drafts: int = 0
    """Requests with drafts, over all steps."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one request's drafts of one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_spec_tokens = max(self.num_spec_tokens, num_draft_tokens)
        per_position = self.num_accepted_tokens_per_pos
        per_position += [0] * (num_draft_tokens - len(per_position))
        for position in range(num_accepted_tokens):
            per_position[position] += 1


class EncoderCacheStats(msgspec.Struct, kw_only=True):
    """Media items that were wanted since the last report, and where they came from."""

    queries: int = 0
    hits: int = 0
    """Found in the encoder cache."""
    loads: int = 0
    """Loaded through the encoder-cache connector."""


class SchedulerStats(msgspec.Struct, kw_only=True):
    """The state of the scheduler and the KV cache after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    encoder_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats | None = None
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = []
    num_preemptions: int = 0
    """Preemptions since the last report."""
    num_scheduled_tokens: int = 0
    """Tokens computed in the step."""
    spec_decoding_stats: SpecDecodingStats | None = None
    """None where nothing was drafted."""
    kv_connector_stats: Any = None
    waiting_lora_adapters: dict[str, int] = {}
    """Waiting requests with each adapter, by its name."""
    running_lora_adapters: dict[str, int] = {}
    encoder_cache_stats: EncoderCacheStats | None = None
    kv_unknown_reports: int = 0
    """Reports of KV transfers that nothing is known of, since the start."""
    num_parked_reqs: int = 0
    """Of the waiting requests, sessions without input."""


class UtilityOutput(msgspec.Struct, array_like=True):
    """The answer to a utility call."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(
    msgspec.Struct, array_like=True, omit_defaults=True, gc=False, kw_only=True
):
    """One message of the core to a front end."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = msgspec.field(default_factory=time.monotonic)
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
