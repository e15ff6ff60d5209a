"""May a request grow, step by step: the traces of `allocate_slots` and its gates."""

from __future__ import annotations

import pytest

from jubako.errors import ConfigError
from jubako.kv_cache import KVCacheBlocks

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


def test_lookup_is_repeated_only_when_something_changed(m, monkeypatch):
    a = request("a", 9)
    admit(m, a)
    calls = []
    find = m.coordinator.find_longest_cache_hit
    monkeypatch.setattr(
        m.coordinator,
        "find_longest_cache_hit",
        lambda *args: calls.append(args) or find(*args),
    )
    b = request("b", [*range(8), 70, 71])
    first = m.get_computed_blocks(b)
    assert m.get_computed_blocks(b) == first
    assert len(calls) == 1
    m.evict_blocks({2})
    assert m.get_computed_blocks(b)[1] == 4
    assert len(calls) == 2


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
