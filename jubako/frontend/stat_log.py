"""What does the log say, now and then, of how an engine is doing?"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from jubako.utils.logging import get_logger

if TYPE_CHECKING:
    from jubako.frontend.stats import IterationStats
    from jubako.scheduler.engine_output import SchedulerStats

logger = get_logger(__name__)

RECENT_REQUESTS = 1000
"""The hit rate is that of the latest requests; an average since the start would never move."""


class LogStatLogger:
    """Writes a line every `interval` seconds of work; an engine that rests says nothing.

    `clock` gives seconds.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._since = clock()
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._lookups: deque[tuple[int, int, int]] = deque()
        """Requests, tokens asked for and tokens found, of each report with lookups."""
        self._num_lookups = 0

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Add the statistics of one step, and write the line if it is time."""
        if iteration_stats is not None:
            self._prompt_tokens += iteration_stats.num_prompt_tokens
            self._generated_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is None:
            return
        found = scheduler_stats.prefix_cache_stats
        if found is not None and found.requests:
            self._add_lookup(found.requests, found.queries, found.hits)
        now = self._clock()
        if now - self._since >= self._interval:
            self._write(scheduler_stats, now - self._since)
            self._since = now
            self._prompt_tokens = self._generated_tokens = 0

    def _add_lookup(self, requests: int, queries: int, hits: int) -> None:
        self._lookups.append((requests, queries, hits))
        self._num_lookups += requests
        while self._num_lookups - self._lookups[0][0] >= RECENT_REQUESTS:
            self._num_lookups -= self._lookups.popleft()[0]

    def _write(self, stats: SchedulerStats, seconds: float) -> None:
        if not self._prompt_tokens and not self._generated_tokens:
            # It has only just begun to work again; the rest is nobody's news.
            return
        queries = sum(q for _, q, _ in self._lookups)
        hits = sum(h for _, _, h in self._lookups)
        logger.info(
            "%d running, %d waiting; %.1f prompt and %.1f generated tokens/s; KV cache %.1f %% in "
            "use, prefix cache hits %.1f %%",
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            self._prompt_tokens / seconds,
            self._generated_tokens / seconds,
            100 * stats.kv_cache_usage,
            100 * hits / queries if queries else 0.0,
        )
