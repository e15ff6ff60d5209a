"""Hit rates and the lives of blocks."""

from __future__ import annotations

import pytest

from jubako.kv_cache import CachingMetrics, KVCacheMetricsCollector, PrefixCacheStats, metrics

from .fakes import admit, chunked, full, make_manager, mamba, request, step


@pytest.fixture
def clock(monkeypatch):
    """Nanoseconds, set by hand."""

    class Clock:
        now = 0

    monkeypatch.setattr(metrics.time, "monotonic_ns", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize("rate", [0, -0.1, 1.1])
def test_sample_rate(rate):
    with pytest.raises(AssertionError, match=f"sample_rate is {rate}"):
        KVCacheMetricsCollector(rate)


def test_life_of_a_block(clock):
    collector = KVCacheMetricsCollector(1.0)
    m = make_manager(full(), num_blocks=3, metrics_collector=collector)
    a = request("a", 5)
    admit(m, a)
    m.free(a)
    for n in range(6):
        clock.now += 10**9
        b = request(f"b{n}", 5)
        assert admit(m, b) == 4
        m.free(b)
    # Each of them took the second block anew.
    assert len(collector.drain_events()) == 6
    clock.now += 2 * 10**9
    admit(m, request("c", range(50, 55)))
    events = collector.drain_events()
    (life,) = (e for e in events if e.reuse_gaps_seconds)
    assert life.lifetime_seconds == 8
    assert life.idle_seconds == 2
    assert life.reuse_gaps_seconds == (1.0, 1.0, 1.0)
    assert collector.drain_events() == []


def test_eviction_by_id_and_reset(clock):
    collector = KVCacheMetricsCollector(1.0)
    m = make_manager(full(), num_blocks=5, metrics_collector=collector)
    a = request("a", 8)
    admit(m, a)
    m.evict_blocks({1})
    (event,) = collector.drain_events()
    assert event.reuse_gaps_seconds == ()
    m.evict_blocks({2})
    m.free(a)
    assert m.reset_prefix_cache()
    assert collector.drain_events() == []
    assert collector.block_metrics == {}


def test_sampling():
    collector = KVCacheMetricsCollector(0.5)
    m = make_manager(full(), num_blocks=1000, metrics_collector=collector)
    step(m, request("a", 900), 900)
    assert 60 < len(collector.block_metrics) < 165


def test_stats_by_hand():
    stats = PrefixCacheStats()
    stats.record(10, 0, preempted=False)
    stats.record(10, 8, preempted=False)
    stats.record(10, 4, preempted=True)
    assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 4)


def test_stats_of_a_manager():
    m = make_manager(full(), num_blocks=8, log_stats=True)
    a, b = request("a", 10), request("b", [*range(8), 90, 91])
    admit(m, a)
    assert admit(m, b) == 8
    big = request("c", 60)
    for _ in range(5):
        # A refused request may ask again; that is no lookup more.
        assert admit(m, big) is None
    skipping = request("d", [5], skip_reading_prefix_cache=True)
    admit(m, skipping)
    stats = m.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
    m.free(b)
    b.num_computed_tokens, b.num_preemptions = 0, 1
    admit(m, b)
    a.extend([1])
    step(m, a, 1)
    stats = m.make_prefix_cache_stats()
    assert stats.requests == 0
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 8)
    assert make_manager(full()).make_prefix_cache_stats() is None


def test_hits_without_blocks_are_counted_apart():
    m = make_manager(chunked(8), log_stats=True)
    assert admit(m, request("a", 22)) == 16
    stats = m.make_prefix_cache_stats()
    assert (stats.queries, stats.hits, stats.null_hits) == (22, 0, 16)


def test_reset_is_flagged():
    m = make_manager(full(), log_stats=True)
    assert m.reset_prefix_cache()
    assert m.make_prefix_cache_stats().reset
    assert not m.make_prefix_cache_stats().reset


def test_hit_rate():
    rate = CachingMetrics(max_recent_requests=5)
    assert rate.hit_rate == 0.0
    rate.observe(PrefixCacheStats(requests=2, queries=20, hits=0))
    rate.observe(PrefixCacheStats())
    assert rate.hit_rate == 0.0
    rate.observe(PrefixCacheStats(requests=3, queries=20, hits=10))
    assert rate.hit_rate == 0.25
    rate.observe(PrefixCacheStats(requests=1, queries=20, hits=20))
    assert rate.hit_rate == 0.75
    rate.observe(PrefixCacheStats(requests=100, queries=10, hits=1))
    assert rate.hit_rate == 0.1
    rate.observe(PrefixCacheStats(reset=True, requests=1, queries=4, hits=4))
    assert rate.hit_rate == 1.0


def test_lost_hits():
    """Tokens that the full groups have, but a state is missing to go on from there."""
    m = make_manager(full(), mamba(), num_blocks=60, log_stats=True)
    a = request("a", 24)
    for n in (8, 16):
        step(m, a, n)
        m.new_step_starts()
    m.make_prefix_cache_stats()
    b = request("b", [*range(20), 90])
    # However often it is looked up.
    m.get_computed_blocks(b)
    assert admit(m, b) == 8
    stats = m.make_prefix_cache_stats()
    assert (stats.queries, stats.hits, stats.lost_hits) == (21, 8, 12)
    assert admit(m, request("c", [*range(24), 91])) == 24
    assert m.make_prefix_cache_stats().lost_hits == 0
    # A refused request has lost nothing yet.
    m.get_computed_blocks(request("d", [*range(20), 92]))
    assert m.make_prefix_cache_stats().lost_hits == 0


def test_nothing_is_lost_with_one_kind_of_group():
    m = make_manager(full(), log_stats=True)
    admit(m, request("a", 9))
    assert admit(m, request("b", 9)) == 8
    assert m.make_prefix_cache_stats().lost_hits == 0
