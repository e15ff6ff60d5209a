"""How well is the cache used: how often do prompts hit, and how long do blocks live?"""

from __future__ import annotations

import random
import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from jubako.kv_cache.blocks import KVCacheBlock

_KEPT_ACCESSES = 4
_NS = 1e9


class PrefixCacheStats(msgspec.Struct):
    """Prefix-cache lookups of the requests admitted since the last report.

    Queries and hits are tokens. Requests that come back after a preemption are counted apart, since
    they nearly always hit. `null_hits` are hit tokens for which no cached block stands: chunked
    attention never reads earlier chunks, so that even an empty cache lets a request skip them.
    `lost_hits` are tokens that full-attention groups had cached beyond the hit: other groups lacked
    what they need to go on from there.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    null_hits: int = 0
    lost_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class CachingMetrics:
    """Hit rate over about the last `max_recent_requests` requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self.reset()

    def reset(self) -> None:
        self._recent: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add one report. A report that is flagged as the first after a reset starts anew."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._add(stats.requests, stats.queries, stats.hits, 1)
        self._recent.append((stats.requests, stats.queries, stats.hits))
        while len(self._recent) > 1 and self._requests > self.max_recent_requests:
            self._add(*self._recent.popleft(), -1)

    def _add(self, requests: int, queries: int, hits: int, sign: int) -> None:
        self._requests += sign * requests
        self._queries += sign * queries
        self._hits += sign * hits

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token, 0.0 if none was queried."""
        return self._hits / self._queries if self._queries else 0.0


class KVCacheEvictionEvent(msgspec.Struct, frozen=True):
    """The life of one sampled block, in seconds."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]
    """Times between its last accesses; empty if there were fewer than two."""


class BlockMetricsState:
    """A sampled block: its birth and last accesses, in nanoseconds of the monotonic clock."""

    __slots__ = ("access_history", "birth_time_ns", "last_access_ns")

    def __init__(self) -> None:
        now = time.monotonic_ns()
        self.birth_time_ns = now
        self.last_access_ns = now
        self.access_history: deque[int] = deque(maxlen=_KEPT_ACCESSES)

    def record_access(self) -> None:
        self.last_access_ns = time.monotonic_ns()
        self.access_history.append(self.last_access_ns)

    def get_lifetime_seconds(self) -> float:
        return (time.monotonic_ns() - self.birth_time_ns) / _NS

    def get_idle_time_seconds(self) -> float:
        return (time.monotonic_ns() - self.last_access_ns) / _NS

    def get_reuse_gaps_seconds(self) -> list[float]:
        times = list(self.access_history)
        return [(after - before) / _NS for before, after in pairwise(times)]


class KVCacheMetricsCollector:
    """Follows a random sample of blocks, `sample_rate` of them (above 0, at most 1)."""

    def __init__(self, sample_rate: float = 0.01) -> None:
        assert 0 < sample_rate <= 1, f"sample_rate is {sample_rate}; it must be in (0, 1]"
        self.sample_rate = sample_rate
        self.block_metrics: dict[int, BlockMetricsState] = {}
        self._eviction_events: list[KVCacheEvictionEvent] = []
        self._random = random.Random()

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        if self._random.random() < self.sample_rate:
            self.block_metrics[block.block_id] = BlockMetricsState()

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        if state := self.block_metrics.get(block.block_id):
            state.record_access()

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        if state := self.block_metrics.pop(block.block_id, None):
            self._eviction_events.append(
                KVCacheEvictionEvent(
                    lifetime_seconds=state.get_lifetime_seconds(),
                    idle_seconds=state.get_idle_time_seconds(),
                    reuse_gaps_seconds=tuple(state.get_reuse_gaps_seconds()),
                )
            )

    def reset(self) -> None:
        self.block_metrics.clear()
        self._eviction_events.clear()

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """The events since the last call."""
        events, self._eviction_events = self._eviction_events, []
        return events
