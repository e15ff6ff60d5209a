"""The line that a server's log gets now and then."""

from __future__ import annotations

import logging

import pytest

from jubako.frontend.stat_log import RECENT_REQUESTS, LogStatLogger
from jubako.frontend.stats import IterationStats
from jubako.kv_cache import PrefixCacheStats
from jubako.scheduler.engine_output import SchedulerStats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jubako"), "propagate", True)
    caplog.set_level(logging.INFO, logger="jubako")
    return lambda: [record.getMessage() for record in caplog.records]


def step(running: int = 1, lookup: tuple[int, int, int] | None = None) -> SchedulerStats:
    found = None
    if lookup is not None:
        found = PrefixCacheStats(requests=lookup[0], queries=lookup[1], hits=lookup[2])
    return SchedulerStats(
        num_running_reqs=running, num_waiting_reqs=2, kv_cache_usage=0.25, prefix_cache_stats=found
    )


def test_a_line_comes_when_its_time_has_come(lines) -> None:
    clock = Clock()
    log = LogStatLogger(10.0, clock)
    tokens = IterationStats(num_prompt_tokens=100, num_generation_tokens=30)
    log.record(step(lookup=(1, 100, 40)), tokens)
    assert not lines()
    clock.now += 10
    log.record(step(running=3), tokens)
    assert lines() == [
        "3 running, 2 waiting; 20.0 prompt and 6.0 generated tokens/s; KV cache 25.0 % in use, "
        "prefix cache hits 40.0 %"
    ]
    clock.now += 9
    log.record(step(), tokens)
    assert len(lines()) == 1


def test_an_engine_that_rested_says_nothing(lines) -> None:
    clock = Clock()
    log = LogStatLogger(10.0, clock)
    clock.now += 1000
    log.record(step(), None)
    assert not lines()


def test_the_hit_rate_is_of_the_latest_requests(lines) -> None:
    clock = Clock()
    log = LogStatLogger(10.0, clock)
    tokens = IterationStats(num_generation_tokens=1)
    log.record(step(lookup=(1, 10**9, 0)), tokens)
    for _ in range(RECENT_REQUESTS // 100):
        log.record(step(lookup=(100, 1000, 500)), tokens)
    clock.now += 10
    log.record(step(), tokens)
    assert lines()[0].endswith("prefix cache hits 50.0 %")
