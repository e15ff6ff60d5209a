"""What happened in a step, and how long did a request take, seen from the front end?"""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from jubako.engine.messages import EngineCoreOutput, FinishReason
from jubako.outputs import RequestStateStats
from jubako.scheduler.engine_output import EngineCoreEventType, SchedulerStats


class FinishedRequestStats(msgspec.Struct, kw_only=True):
    """How a request went. Times in seconds, 0 where an end of the interval never happened."""

    finish_reason: FinishReason
    e2e_latency: float = 0.0
    """Arrival to the last output, on the front end's wall clock."""
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    """Queued to first scheduled."""
    prefill_time: float = 0.0
    """First scheduled to first token."""
    decode_time: float = 0.0
    """First token to last token."""
    inference_time: float = 0.0
    """First scheduled to last token."""
    mean_time_per_output_token: float = 0.0
    """Decode time over the tokens after the first."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class IterationStats(msgspec.Struct, kw_only=True):
    """What the outputs of one step add to the counters and histograms. Times in seconds."""

    iteration_timestamp: float = msgspec.field(default_factory=time.time)
    """Wall clock."""
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    """Of requests that got their first token."""
    num_cached_prompt_tokens: int = 0
    """Of these, found in a cache of this engine."""
    num_external_prompt_tokens: int = 0
    """Of these, loaded from elsewhere."""
    num_preempted_reqs: int = 0
    num_corrupted_reqs: int = 0
    """Requests whose logits were not numbers."""
    time_to_first_tokens_iter: list[float] = []
    inter_token_latencies_iter: list[float] = []
    """One entry per request and step: the time since its last token."""
    finished_requests: list[FinishedRequestStats] = []
    max_num_generation_tokens_iter: list[int] = []
    """For each request that ended, tokens of its longest answer."""
    n_params_iter: list[int] = []
    """For each request that ended, its `n`."""


class StatLogger(Protocol):
    """Takes the statistics of every step."""

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Add those of one step; one of the two may be missing."""
        ...


def update_request_stats(
    stats: RequestStateStats,
    output: EngineCoreOutput,
    timestamp: float,
    num_prompt_tokens: int,
    iteration: IterationStats | None,
) -> None:
    """Take over what one output says, into the request's times and the step's sums.

    `timestamp` is the core's monotonic clock.
    """
    if output.events:
        _apply_events(stats, output, iteration)
    count = len(output.new_token_ids)
    if output.num_nans_in_logits and not stats.is_corrupted:
        stats.is_corrupted = True
        if iteration is not None:
            iteration.num_corrupted_reqs += 1
    if not count:
        return
    stats.num_generation_tokens += count
    if stats.first_token_ts == 0.0:
        stats.first_token_ts = timestamp
        stats.first_token_latency = time.time() - stats.arrival_time
        if iteration is not None:
            iteration.num_prompt_tokens += num_prompt_tokens
            external = output.num_external_computed_tokens
            iteration.num_external_prompt_tokens += external
            iteration.num_cached_prompt_tokens += output.num_cached_tokens - external
            iteration.time_to_first_tokens_iter.append(stats.first_token_latency)
    elif iteration is not None:
        iteration.inter_token_latencies_iter.append(timestamp - stats.last_token_ts)
    stats.last_token_ts = timestamp
    if iteration is not None:
        iteration.num_generation_tokens += count


def _apply_events(
    stats: RequestStateStats, output: EngineCoreOutput, iteration: IterationStats | None
) -> None:
    for event in output.events or ():
        if event.type is EngineCoreEventType.QUEUED:
            stats.queued_ts = event.timestamp
        elif event.type is EngineCoreEventType.SCHEDULED:
            if stats.scheduled_ts == 0.0:
                stats.scheduled_ts = event.timestamp
        elif event.type is EngineCoreEventType.PREEMPTED:
            stats.num_preemptions += 1
            if iteration is not None:
                iteration.num_preempted_reqs += 1


def finished_request_stats(
    stats: RequestStateStats,
    reason: FinishReason,
    num_prompt_tokens: int,
    max_tokens: int | None,
    num_cached_tokens: int,
) -> FinishedRequestStats:
    """The intervals of a request that has just ended."""
    decode = _interval(stats.first_token_ts, stats.last_token_ts)
    tokens = stats.num_generation_tokens
    return FinishedRequestStats(
        finish_reason=reason,
        e2e_latency=time.time() - stats.arrival_time,
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=tokens,
        max_tokens_param=max_tokens,
        queued_time=_interval(stats.queued_ts, stats.scheduled_ts),
        prefill_time=_interval(stats.scheduled_ts, stats.first_token_ts),
        decode_time=decode,
        inference_time=_interval(stats.scheduled_ts, stats.last_token_ts),
        mean_time_per_output_token=decode / (tokens - 1) if tokens > 1 else 0.0,
        num_cached_tokens=num_cached_tokens,
        num_preemptions=stats.num_preemptions,
    )


def _interval(start: float, end: float) -> float:
    return max(end - start, 0.0) if start and end else 0.0


class TotalsLogger:
    """Adds everything up; what `LLM.get_metrics` returns.

    Names are those of the metrics, without prefix and suffix.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, int] = {
            "prompt_tokens": 0,
            "prompt_tokens_cached": 0,
            "generation_tokens": 0,
            "num_preemptions": 0,
            "prefix_cache_queries": 0,
            "prefix_cache_hits": 0,
        }
        self._success = {str(reason): 0 for reason in FinishReason}

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Add the statistics of one step."""
        counters = self._counters
        if scheduler_stats is not None:
            self._gauges = {
                "num_requests_running": scheduler_stats.num_running_reqs,
                "num_requests_waiting": scheduler_stats.num_waiting_reqs,
                "kv_cache_usage_perc": scheduler_stats.kv_cache_usage,
            }
            counters["num_preemptions"] += scheduler_stats.num_preemptions
            prefix = scheduler_stats.prefix_cache_stats
            if prefix is not None:
                counters["prefix_cache_queries"] += prefix.queries
                counters["prefix_cache_hits"] += prefix.hits
        if iteration_stats is not None:
            counters["prompt_tokens"] += iteration_stats.num_prompt_tokens
            counters["prompt_tokens_cached"] += iteration_stats.num_cached_prompt_tokens
            counters["generation_tokens"] += iteration_stats.num_generation_tokens
            for finished in iteration_stats.finished_requests:
                self._success[str(finished.finish_reason)] += 1

    def totals(self) -> dict[str, Any]:
        """Everything since the start; `request_success` by finish reason."""
        return {**self._gauges, **self._counters, "request_success": dict(self._success)}
