"""May a request grow, step by step: the traces of `allocate_slots` and its gates."""

from __future__ import annotations

from random import Random

import pytest

from jubako.errors import ConfigError
from jubako.kv_cache import KVCacheBlocks
from jubako.kv_cache.lookup_memory import MAX_CHANGES, MAX_LOOKUPS

from .fakes import (
    admit,
    chunked,
    cross,
    full,
    hashed,
    make_manager,
    mamba,
    queue,
    request,
    step,
    table,
    window,
)


@pytest.fixture
def m():
    return make_manager(full(), num_blocks=13)


def test_trace(m):
    a = request("a", 10)
    assert step(m, a, 6) == [[1, 2]]
    assert hashed(m) == [1]
    assert step(m, a, 4) == [[3]]
    assert (table(m, a), hashed(m)) == ([1, 2, 3], [1, 2])
    a.extend([50])
    # Two drafts, of which neither is accepted.
    assert m.allocate_slots(a, 3, num_lookahead_tokens=2).get_block_ids() == ([4],)
    assert (table(m, a), hashed(m)) == ([1, 2, 3, 4], [1, 2])
    a.num_computed_tokens = 11
    a.extend([51])
    assert m.allocate_slots(a, 1) is m.empty_kv_cache_blocks
    assert (table(m, a), hashed(m)) == ([1, 2, 3, 4], [1, 2, 3])
    a.num_computed_tokens = 12
    assert m.allocate_slots(a, 60) is None
    assert table(m, a) == [1, 2, 3, 4]


def test_lookahead_stops_at_max_model_len():
    m = make_manager(full(), num_blocks=13, max_model_len=16)
    a = request("a", 14)
    step(m, a, 14, num_lookahead_tokens=10)
    assert len(table(m, a)) == 4


def test_external_tokens(m):
    a = request("a", 21)
    assert step(m, a, 13, num_external_computed_tokens=8) == [[3, 4, 5, 6]]
    assert table(m, a) == [1, 2, 3, 4, 5, 6]
    assert hashed(m) == [1, 2, 3, 4, 5]


def test_async_external_tokens(m):
    a = request("a", 21)
    added = m.allocate_slots(a, 0, num_external_computed_tokens=20, delay_cache_blocks=True)
    assert added is m.empty_kv_cache_blocks
    assert (table(m, a), hashed(m)) == ([1, 2, 3, 4, 5], [])
    m.cache_blocks(a, 20)
    assert hashed(m) == [1, 2, 3, 4, 5]
    a.num_computed_tokens = 20
    assert step(m, a, 1) == [[6]]


def test_external_tokens_outside_the_window_cost_nothing():
    m = make_manager(window(8), num_blocks=13)
    a = request("a", 30)
    assert step(m, a, 6, num_external_computed_tokens=24) == [[3, 4]]
    assert table(m, a) == [0, 0, 0, 0, 1, 2, 3, 4]


def test_unaligned_external_tokens(m):
    a = request("a", 30)
    m.allocate_slots(a, 0, num_external_computed_tokens=10, delay_cache_blocks=True)
    assert table(m, a) == [1, 2, 3]
    a.num_computed_tokens = 10
    assert step(m, a, 20) == [[4, 5, 6, 7, 8]]
    assert len(hashed(m)) == 7


def test_nothing_to_allocate(m):
    with pytest.raises(ValueError, match="request a"):
        m.allocate_slots(request("a", 4), 0)


def test_tail_is_freed_first(m):
    a = request("a", 10)
    m = make_manager(full(), num_blocks=11)
    admit(m, a)
    assert (table(m, a), hashed(m)) == ([1, 2, 3], [1, 2])
    m.free(a)
    assert queue(m) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    b = request("b", [*range(8), 90, 91, 92])
    assert admit(m, b) == 8
    assert table(m, b) == [1, 2, 4]
    assert queue(m) == [5, 6, 7, 8, 9, 10, 3]


@pytest.mark.parametrize(("length", "hit"), [(8, 4), (9, 8)])
def test_last_token_is_computed(m, length, hit):
    admit(m, request("a", 8))
    blocks, found = m.get_computed_blocks(request("b", 9).__class__("b", list(range(length))))
    assert found == hit
    assert len(blocks.blocks[0]) == hit // 4


def test_lookup_is_skipped(m):
    admit(m, request("a", 9))
    b = request("b", 9, skip_reading_prefix_cache=True)
    assert m.get_computed_blocks(b) == (m.empty_kv_cache_blocks, 0)
    off = make_manager(full(), enable_caching=False)
    assert off.get_computed_blocks(request("b", 9)) == (off.empty_kv_cache_blocks, 0)


@pytest.fixture
def lookups(m, monkeypatch):
    """The lookups that `m` really makes."""
    calls = []
    find = m.coordinator.find_hit
    monkeypatch.setattr(m.coordinator, "find_hit", lambda *args: calls.append(args) or find(*args))
    return calls


def test_lookup_is_repeated_only_when_something_changed(m, lookups):
    a = request("a", 9)
    admit(m, a)
    del lookups[:]
    b = request("b", [*range(8), 70, 71])
    first = m.get_computed_blocks(b)
    assert m.get_computed_blocks(b) == first
    assert len(lookups) == 1
    # What others do is of no interest.
    admit(m, request("c", range(200, 209)))
    del lookups[:]
    assert m.get_computed_blocks(b) == first
    assert lookups == []
    m.evict_blocks({2})
    assert m.get_computed_blocks(b)[1] == 4
    assert len(lookups) == 1
    b.extend([72])
    m.get_computed_blocks(b)
    assert len(lookups) == 2


def test_lookups_of_many_waiting_requests_are_remembered(m, lookups):
    admit(m, request("a", 9))
    waiting = [request(f"w{i}", [*range(8), 50 + i]) for i in range(9)]
    del lookups[:]
    for _ in range(3):
        assert [m.get_computed_blocks(r)[1] for r in waiting] == [8] * 9
    assert len(lookups) == 9
    # A prefix that one of them shares grows.
    admit(m, request("b", [*range(8), 53, 60, 61, 62, 63]))
    del lookups[:]
    assert [m.get_computed_blocks(r)[1] for r in waiting] == [8] * 9
    assert lookups == []
    longer = request("l", [*range(8), 53, 60, 61, 62, 99])
    assert m.get_computed_blocks(longer)[1] == 12
    assert m.reset_prefix_cache() is False
    m.block_pool.evict_blocks({1})
    assert [m.get_computed_blocks(r)[1] for r in [*waiting, longer]] == [0] * 10


def test_memory_of_lookups_is_bounded(m):
    memory = m.block_pool.lookup_memory
    for i in range(100):
        m.get_computed_blocks(request(f"w{i}", [i] * 9))
    assert len(memory) == MAX_LOOKUPS
    for i in range(MAX_CHANGES):
        memory.changed([bytes([i % 256])])
    assert len(memory) == MAX_LOOKUPS
    memory.changed([b"one too many"])
    assert len(memory) == 0
    assert not memory.active


def test_lookups_are_forgotten_with_the_cache(m):
    a, b = request("a", 9), request("b", 9)
    admit(m, a)
    m.free(a)
    assert m.get_computed_blocks(b)[1] == 8
    assert m.block_pool.reset_prefix_cache()
    assert m.get_computed_blocks(b)[1] == 0


def test_requests_that_end_are_not_remembered(m):
    memory = m.block_pool.lookup_memory
    a, b, c = (request(name, 9) for name in "abc")
    for req in (a, b, c):
        m.get_computed_blocks(req)
    admit(m, a)
    m.free(b)
    assert len(memory) == 1
    m.pop_blocks_for_free(c)
    assert (len(memory), memory.active) == (0, False)


def test_nothing_is_registered_without_caching():
    m = make_manager(full(), window(8), enable_caching=False)
    a = request("a", 9)
    step(m, a, 9)
    m.cache_blocks(a, 9)
    assert hashed(m) == []
    assert m.make_prefix_cache_stats() is None


def test_watermark():
    m = make_manager(full(), num_blocks=20, watermark=0.25)
    assert m.watermark_blocks == 5
    a = request("a", 56)
    admit(m, a, has_scheduled_reqs=False)
    assert m.block_pool.get_num_free_blocks() == 5
    b = request("b", [7])
    assert m.allocate_slots(b, 1) is None
    assert m.allocate_slots(b, 1, has_scheduled_reqs=False) is not None
    m.free(b)
    b.awaits_admission = False
    assert m.allocate_slots(b, 1) is not None
    m.free(b)
    b.awaits_admission = True
    assert m.allocate_slots(b, 1) is None


def test_negative_watermark():
    with pytest.raises(AssertionError, match=r"watermark is -0\.1"):
        make_manager(full(), watermark=-0.1)


def test_full_sequence_must_fit():
    m = make_manager(full(), num_blocks=11)
    assert m.allocate_slots(request("a", 60), 16, full_sequence_must_fit=True) is None
    assert m.allocate_slots(request("b", 40), 16, full_sequence_must_fit=True) is not None

    m = make_manager(full(), num_blocks=11)
    a = request("a", 16)
    admit(m, a)
    assert m.block_pool.get_num_free_blocks() == 6
    assert admit(m, request("b", 40), 16, full_sequence_must_fit=True) == 16


def test_refusal_of_the_whole_changes_nothing():
    m = make_manager(window(8), num_blocks=8)
    a = request("a", 24)
    step(m, a, 16)
    before = m.get_block_ids("a"), queue(m), hashed(m)
    a.extend(range(100, 300))
    blocked = request("b", 200)
    assert m.allocate_slots(blocked, 8, full_sequence_must_fit=True) is None
    assert (m.get_block_ids("a"), queue(m), hashed(m)) == before
    assert m.get_block_ids("b") == ([],)
    assert "b" not in m.coordinator.single_type_managers[0].req_to_blocks


@pytest.mark.parametrize(
    ("watermark", "reserved", "ok"), [(0, 6, False), (0, 5, True), (0.2, 4, False), (0.2, 3, True)]
)
def test_reserved_blocks(watermark, reserved, ok):
    m = make_manager(full(), num_blocks=11, watermark=watermark)
    got = m.allocate_slots(request("a", 20), 20, reserved_blocks=reserved)
    assert (got is not None) == ok


def test_empty_results_are_one_object(m):
    a = request("a", 3)
    step(m, a, 3)
    a.extend([1])
    empty = m.empty_kv_cache_blocks
    assert m.allocate_slots(a, 1) is empty
    assert m.create_kv_cache_blocks([[]]) is empty
    assert m.get_blocks("nobody") is empty
    assert m.get_block_ids("nobody") == ([],)
    assert m.get_computed_blocks(request("b", 3))[0] is empty
    # An empty object of the caller's own is as good.
    a.num_computed_tokens = 4
    a.extend([2])
    assert m.allocate_slots(a, 1, new_computed_blocks=KVCacheBlocks(([],))) is not None


def test_hits_of_a_running_request_are_a_bug(m):
    a = request("a", 9)
    admit(m, a)
    hits, _ = m.get_computed_blocks(request("b", 9))
    a.extend([1])
    with pytest.raises(AssertionError, match="running request a"):
        m.allocate_slots(a, 1, 8, hits)


def test_hits_without_caching_are_a_bug():
    m = make_manager(full(), enable_caching=False)
    hits = KVCacheBlocks((m.block_pool.blocks[5:6],))
    with pytest.raises(AssertionError, match="prefix caching is off"):
        m.allocate_slots(request("a", 9), 5, 4, hits)


def test_external_tokens_for_an_old_table_are_a_bug():
    m = make_manager(full(), enable_caching=False)
    a = request("a", 9)
    step(m, a, 5)
    with pytest.raises(AssertionError, match="already has a table"):
        m.allocate_slots(a, 1, num_external_computed_tokens=4)


def test_pop_blocks_for_free():
    m = make_manager(full(), window(8), num_blocks=20)
    a = request("a", 9)
    admit(m, a)
    blocks = m.pop_blocks_for_free(a)
    assert [b.block_id for b in blocks] == [1, 2, 3, 4, 5, 6]
    assert m.get_block_ids("a") == ([], [])
    assert not m.reset_prefix_cache()
    m.block_pool.free_blocks(reversed(blocks))
    assert m.usage == 0
    assert m.reset_prefix_cache()


def test_free_is_by_depth_over_all_groups():
    for interleaved, order in ((True, [6, 3, 5, 2, 4, 1]), (False, [3, 2, 1, 6, 5, 4])):
        m = make_manager(full(), window(8), num_blocks=8, interleaved_free=interleaved)
        a = request("a", 9)
        admit(m, a)
        m.free(a)
        assert queue(m) == [7, *order]


def test_free_is_by_depth_with_other_block_sizes():
    m = make_manager(full(), window(8, block_size=8), num_blocks=8)
    a = request("a", 16)
    admit(m, a)
    assert m.get_block_ids("a") == ([1, 2, 3, 4], [5, 6])
    m.free(a)
    assert queue(m) == [7, 4, 6, 3, 2, 5, 1]


def test_free_of_an_unknown_request(m):
    m.free(request("nobody", 4))
    assert m.usage == 0


def test_block_ids_for_computed_tokens():
    m = make_manager(full(), cross(), enable_caching=False)
    a = request("a", 9)
    m.allocate_slots(a, 9, num_lookahead_tokens=8, num_encoder_tokens=5)
    assert m.get_block_ids_for_computed_tokens("a", 9) == ([1, 2, 3], [6, 7])


def test_remove_skipped_blocks():
    m = make_manager(window(8), num_blocks=20)
    a = request("a", 16)
    admit(m, a)
    m.remove_skipped_blocks("a", 15)
    assert table(m, a) == [0, 0, 3, 4]


def test_cross_attention_refuses_caching():
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make_manager(full(), cross())


def test_chunks_refuse_eagle():
    with pytest.raises(ConfigError, match="EAGLE"):
        make_manager(full(), chunked(8), use_eagle=True)
    make_manager(full(), chunked(8), use_eagle=True, eagle_groups={0})
    make_manager(full(), chunked(8), use_eagle=True, enable_caching=False)


def test_model_without_kv():
    m = make_manager(num_blocks=1)
    a = request("a", 9)
    assert admit(m, a) == 0
    assert m.usage == 0
    assert m.get_block_ids("a") == ()
    m.free(a)


@pytest.mark.parametrize(
    "specs",
    [
        [full()],
        [window(8)],
        [full(), window(8), window(5)],
        [full(), chunked(8)],
        [chunked(4)],
        [full(), mamba("align")],
        [mamba("all")],
    ],
    ids=str,
)
@pytest.mark.parametrize("caching", [True, False])
def test_next_event_tokens(specs, caching):
    """Below the announced count a call changes nothing, at the count it may."""

    def state():
        return m.get_block_ids("a"), queue(m), hashed(m)

    m = make_manager(*specs, num_blocks=200, enable_caching=caching)
    a = request("a", 10)
    assert m.next_event_tokens("a") == 0
    step(m, a, 10)
    quiet = 0
    for token in range(60):
        a.extend([100 + token])
        due = m.next_event_tokens("a")
        before = state()
        # Forces the long way round.
        m._edges["a"].event = 0
        m.allocate_slots(a, 1)
        a.num_computed_tokens += 1
        if a.num_computed_tokens < due:
            quiet += 1
            assert state() == before
    assert quiet > 10
    m.free(a)
    assert m.next_event_tokens("a") == 0


def test_quiet_steps_are_short(m, monkeypatch):
    a = request("a", 5)
    step(m, a, 5)
    monkeypatch.setattr(m, "coordinator", None)
    for _ in range(2):
        a.extend([1])
        step(m, a, 1)
    assert m.next_event_tokens("a") == 8


def test_late_tokens_are_registered(m):
    """Asynchronous scheduling: tokens are known one step after they were planned."""
    a = request("a", 7)
    step(m, a, 7)
    step(m, a, 1)
    assert hashed(m) == [1]
    a.extend([50])
    m.cache_blocks(a, 8)
    assert hashed(m) == [1, 2]
    step(m, a, 1)
    assert table(m, a) == [1, 2, 3]


def test_new_block_ids():
    m = make_manager(full(), window(8), num_blocks=20)
    a = request("a", 9)
    admit(m, a)
    assert m.take_new_block_ids() == [1, 2, 3, 4, 5, 6]
    # Hits hold what they hold.
    admit(m, request("b", [*range(8), 50]))
    assert m.take_new_block_ids() == [7, 8]
    m.free(a)
    assert m.take_new_block_ids() == []
    admit(m, request("c", range(60, 64)))
    m.new_step_starts()
    assert m.take_new_block_ids() == []


class Untouched(list):
    """A table that must not be walked."""

    def __iter__(self):
        raise AssertionError("walked")


def test_eviction_of_blocks_in_use_looks_at_their_requests_only():
    m = make_manager(full(), window(8), num_blocks=400)
    others = [request(f"o{i}", range(1000 * i, 1000 * i + 20)) for i in range(1, 9)]
    for other in others:
        admit(m, other)
    a, b, c = request("a", 16), request("b", [*range(16), 50]), request("c", [*range(8), 60])
    for req in (a, b, c):
        admit(m, req)
    shared = m.get_blocks("a").blocks[0]
    for manager in m.coordinator.single_type_managers:
        for other in others:
            table_of = manager.req_to_blocks
            table_of[other.request_id] = Untouched(table_of[other.request_id])
    m.evict_blocks({shared[1].block_id, shared[3].block_id})
    full_manager, window_manager = m.coordinator.single_type_managers
    registered = full_manager.num_cached_block
    assert [registered[name] for name in "abc"] == [1, 1, 1]
    assert all(registered[other.request_id] == 5 for other in others)
    assert [window_manager.num_cached_block[name] for name in "ab"] == [4, 4]
    assert [m.next_event_tokens(name) for name in "abc"] == [0, 0, 0]
    assert all(m.next_event_tokens(other.request_id) > 0 for other in others)
    # Each makes its own blocks findable again.
    a.extend([70])
    step(m, a, 1)
    assert m.get_computed_blocks(request("d", 17))[1] == 16


def test_eviction_finds_those_who_hit_a_block_of_a_request_that_is_gone():
    m = make_manager(full(), num_blocks=40)
    a = request("a", 16)
    admit(m, a)
    b = request("b", [*range(16), 50])
    admit(m, b)
    m.free(a)
    m.evict_blocks({table(m, b)[2]})
    assert m.coordinator.single_type_managers[0].num_cached_block == {"b": 2}
    b.extend([51])
    step(m, b, 1)
    assert m.get_computed_blocks(request("c", 17))[1] == 16


@pytest.mark.parametrize(
    "specs", [[full()], [full(), window(8), window(13)], [full(), mamba(), chunked(8)]], ids=str
)
def test_same_calls_same_ids(specs):
    """Whatever the requests are called, and whatever else came before them in other managers."""

    def play(names):
        rng = Random(3)
        m = make_manager(*specs, num_blocks=60)
        live, seen = [], []
        for turn in range(200):
            m.new_step_starts()
            if rng.random() < 0.4:
                tokens = [*range(rng.randint(0, 30)), *range(7000 + turn, 7003 + turn)]
                req = request(names(turn), tokens)
                if admit(m, req) is not None:
                    live.append(req)
            for req in live:
                if rng.random() < 0.5:
                    req.extend([turn])
                    if step(m, req, 1) is None:
                        del req.all_token_ids[-1]
            if live and rng.random() < 0.3:
                m.free(live.pop(rng.randrange(len(live))))
            seen.append([m.get_block_ids(req.request_id) for req in live])
            seen.append(queue(m))
        return seen

    assert play(str) == play(lambda turn: f"{turn * 7919 % 1000}-{'x' * (turn % 5)}")
