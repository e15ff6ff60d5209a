"""The lives of requests under each attention type, step by step."""

from __future__ import annotations

import pytest

from jubako.errors import ConfigError
from jubako.kv_cache import FullAttentionSpec, MLAAttentionSpec
from jubako.kv_cache.managers import get_manager_for_kv_cache_spec, spec_manager_map
from jubako.kv_cache.sinks import sink_block_ids

from .fakes import (
    ATTENTION,
    admit,
    chunked,
    config_of,
    cross,
    full,
    hashed,
    make_manager,
    mamba,
    queue,
    request,
    sink,
    step,
    table,
    window,
)

MLA = MLAAttentionSpec(block_size=4, **ATTENTION)


def test_full_common_prefix():
    m = make_manager(full(), num_blocks=12)
    a, b = request("a", 9), request("b", [*range(8), 99])
    admit(m, a)
    assert table(m, a) == [1, 2, 3]
    assert admit(m, b) == 8
    assert table(m, b) == [1, 2, 4]
    assert m.get_num_common_prefix_blocks("a") == [2]
    admit(m, request("c", [70, 71, 72]))
    assert m.get_num_common_prefix_blocks("a") == [0]


def test_common_prefix_is_counted_when_tables_come_and_go(monkeypatch):
    m = make_manager(full(), num_blocks=40)
    requests = [request(name, [*range(8), 90 + i]) for i, name in enumerate("abc")]
    for req in requests:
        admit(m, req)
    manager = m.coordinator.single_type_managers[0]
    counted = []
    count = manager._count_common_prefix
    monkeypatch.setattr(
        manager, "_count_common_prefix", lambda *args: counted.append(args) or count(*args)
    )
    for token in range(20):
        for req in requests:
            req.extend([token])
            step(m, req, 1)
        assert m.get_num_common_prefix_blocks("a") == [2]
    assert len(counted) == 1
    short = request("short", [*range(4), 80])
    assert admit(m, short) == 4
    assert m.get_num_common_prefix_blocks("a") == [1]
    m.free(short)
    assert m.get_num_common_prefix_blocks("a") == [2]
    # Blocks of a table that was handed over lose their owner later.
    blocks = m.pop_blocks_for_free(requests[2])
    assert m.get_num_common_prefix_blocks("a") == [0]
    m.block_pool.free_blocks(reversed(blocks))
    assert m.get_num_common_prefix_blocks("a") == [2]
    m.free(requests[1])
    assert m.get_num_common_prefix_blocks("a") == [len(table(m, requests[0]))]


@pytest.mark.parametrize("spec", [full(), MLA])
def test_full_context_parallel(spec):
    m = make_manager(spec, num_blocks=12, hash_block_size=16, dcp_world_size=2, pcp_world_size=2)
    a = request("a", 50, hash_block_size=16)
    admit(m, a)
    assert len(table(m, a)) == 4
    assert admit(m, request("b", 50, hash_block_size=16)) == 48


@pytest.mark.parametrize(("length", "hit"), [(5, 0), (8, 0), (9, 4), (12, 4)])
def test_full_eagle(length, hit):
    m = make_manager(full(), num_blocks=20, use_eagle=True)
    admit(m, request("a", 8))
    b = request("b", [*range(8), *range(50, 54)][:length])
    assert m.get_computed_blocks(b)[1] == hit


def test_revived_hits_count_as_needed():
    m = make_manager(full(), num_blocks=8)
    a = request("a", 9)
    admit(m, a)
    m.free(a)
    b = request("b", [*range(8), *range(50, 62)])
    hits, hit = m.get_computed_blocks(b)
    assert (hit, hits.get_block_ids()) == (8, ([1, 2],))
    needed = m.coordinator.get_num_blocks_to_allocate("b", 20, hits.blocks, 0, 8, 20)
    assert needed == 5
    admit(m, b)
    assert table(m, b) == [1, 2, 4, 5, 6]
    assert m.block_pool.get_num_free_blocks() == 2


def test_window_life():
    m = make_manager(window(8), num_blocks=11)
    a = request("a", 12)
    admit(m, a)
    assert table(m, a) == [1, 2, 3]
    expected = {
        13: [0, 2, 3, 4],
        14: [0, 2, 3, 4],
        15: [0, 2, 3, 4],
        16: [0, 0, 3, 4],
        17: [0, 0, 3, 4, 5],
        18: [0, 0, 3, 4, 5],
    }
    for length, ids in expected.items():
        a.extend([100 + length])
        step(m, a, 1)
        assert table(m, a) == ids, length
    tokens = list(a.all_token_ids)
    m.free(a)
    assert queue(m)[-5:] == [1, 2, 5, 4, 3]
    b = request("b", tokens)
    blocks, hit = m.get_computed_blocks(b)
    assert (hit, blocks.get_block_ids()) == (16, ([0, 0, 3, 4],))


def test_window_chunked_prefill_is_constant():
    m = make_manager(window(8), num_blocks=12)
    a = request("a", 24)
    free = []
    for _ in range(3):
        step(m, a, 8)
        free.append(m.block_pool.get_num_free_blocks())
    assert table(m, a) == [0, 0, 3, 4, 5, 6]
    assert free[1:] == [7, 7]


@pytest.mark.parametrize(("computed", "skipped"), [(7, 0), (8, 1), (11, 4), (12, 5), (20, 13)])
def test_window_skipped(computed, skipped):
    manager = make_manager(window(8)).coordinator.single_type_managers[0]
    assert manager.get_num_skipped_tokens(computed) == skipped


@pytest.mark.parametrize(("computed", "skipped"), [(7, 0), (8, 8), (13, 8), (16, 16)])
def test_chunked_skipped(computed, skipped):
    manager = make_manager(chunked(8)).coordinator.single_type_managers[0]
    assert manager.get_num_skipped_tokens(computed) == skipped


def test_chunked_cold_hit():
    m = make_manager(chunked(8), num_blocks=20)
    a = request("a", 22)
    blocks, hit = m.get_computed_blocks(a)
    assert (hit, blocks.get_block_ids()) == (16, ([0, 0, 0, 0],))
    admit(m, a)
    assert table(m, a) == [0, 0, 0, 0, 1, 2]


def test_chunked_life():
    m = make_manager(chunked(8), num_blocks=20, enable_caching=False)
    a = request("a", 15)
    step(m, a, 15)
    assert table(m, a) == [1, 2, 3, 4]
    for ids in ([0, 0, 3, 4], [0, 0, 0, 0, 5]):
        a.extend([9])
        step(m, a, 1)
        assert table(m, a) == ids


def test_mamba_none():
    m = make_manager(mamba("none", block_size=1000), num_blocks=20, enable_caching=False)
    a = request("a", 10)
    step(m, a, 10)
    assert table(m, a) == [1]
    m = make_manager(mamba("none", sp=2, block_size=1000), num_blocks=20, enable_caching=False)
    for _ in range(4):
        step(m, a, 3)
        assert len(table(m, a)) == 3


def test_mamba_all():
    m = make_manager(mamba("all"), num_blocks=20)
    a = request("a", 10)
    step(m, a, 10)
    assert table(m, a) == [1, 2, 3]
    for ids in ([0, 0, 3], [0, 0, 3], [0, 0, 3, 4]):
        a.extend([50])
        step(m, a, 1)
        assert table(m, a) == ids
    m.new_step_starts()
    b = request("b", [*range(10), 60, 61])
    blocks, hit = m.get_computed_blocks(b)
    assert (hit, blocks.get_block_ids()) == (8, ([0, 2],))


def test_mamba_all_speculative():
    m = make_manager(mamba("all", sp=1), num_blocks=20)
    a = request("a", 6)
    step(m, a, 6)
    assert table(m, a) == [1, 2, 3]
    a.extend([50])
    step(m, a, 1)
    assert table(m, a) == [0, 2, 3]


def test_mamba_align_life():
    m = make_manager(mamba(), num_blocks=20)
    a = request("a", 22)
    tables = []
    for n in (8, 8, 4, 2, 1, 1, 1, 1):
        if a.num_computed_tokens >= 22:
            a.extend([100 + a.num_tokens])
        step(m, a, n)
        tables.append(table(m, a))
        assert sum(i > 0 for i in tables[-1]) <= 2
    assert tables == [
        [0, 1],
        [0, 1, 0, 2],
        [0, 0, 0, 2, 3],
        [0, 0, 0, 0, 3, 4],
        [0, 0, 0, 0, 0, 4],
        [0, 0, 0, 0, 0, 4],
        [0, 0, 0, 0, 0, 4, 5],
        [0, 0, 0, 0, 0, 0, 5],
    ]
    m.new_step_starts()
    for shared, hit, ids in ((20, 20, [0, 0, 0, 0, 3]), (14, 8, [0, 1])):
        b = request("b", [*range(shared), *range(200, 206)])
        blocks, found = m.get_computed_blocks(b)
        assert (found, blocks.get_block_ids()) == (hit, (ids,))


def test_mamba_align_speculative():
    m = make_manager(mamba(sp=2), num_blocks=20)
    a = request("a", 20)
    step(m, a, 8)
    assert table(m, a) == [0, 1, 2, 3]
    assert step(m, a, 12) == [[2, 3, 4]]
    assert table(m, a) == [0, 1, 0, 0, 2, 3, 4]
    manager = m.coordinator.single_type_managers[0]
    assert manager._align["a"].superseded == [1]


def test_cross_attention():
    m = make_manager(full(), cross(), num_blocks=20, enable_caching=False)
    a = request("a", 6)
    m.allocate_slots(a, 6, num_encoder_tokens=10)
    assert m.get_block_ids("a") == ([1, 2], [3, 4, 5])
    a.num_computed_tokens = 6
    m.allocate_slots(a, 3)
    assert m.get_block_ids("a") == ([1, 2, 6], [3, 4, 5])
    manager = m.coordinator.single_type_managers[1]
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        manager.cache_blocks(a, 4)
    with pytest.raises(NotImplementedError):
        manager.find_longest_cache_hit([], 4, (0,), m.block_pool, cross(), False, 4)
    with pytest.raises(AssertionError):
        manager.allocate_new_computed_blocks("b", m.block_pool.blocks[5:6], 4, 0)
    m.free(a)
    assert m.usage == 0


def test_sinks():
    m = make_manager(sink(8), num_blocks=10)
    manager = m.coordinator.single_type_managers[0]
    assert [b.block_id for b in manager.sink_blocks] == [1, 2]
    assert m.usage == 0
    a = request("a", 9)
    admit(m, a)
    assert table(m, a) == [3, 4, 5]
    assert hashed(m) == [3, 4]
    m.free(a)
    b = request("b", 9)
    assert m.get_computed_blocks(b)[0].get_block_ids() == ([3, 4],)
    assert m.usage == 0
    assert m.reset_prefix_cache()


def test_a_worker_knows_which_blocks_are_sinks():
    groups = [sink(8), full(), sink(12)]
    m = make_manager(*groups, num_blocks=20)
    taken = [
        [b.block_id for b in getattr(manager, "sink_blocks", [])]
        for manager in m.coordinator.single_type_managers
    ]
    known = sink_block_ids(config_of(groups, 20).kv_cache_groups)
    assert taken == [list(ids) for ids in known] == [[1, 2], [], [3, 4, 5]]


@pytest.mark.parametrize("sink_len", [None, 0, 3, 6])
def test_sink_len_is_checked(sink_len):
    with pytest.raises(AssertionError, match=f"sink_len is {sink_len}"):
        make_manager(sink(sink_len))


def test_more_sinks_than_blocks():
    with pytest.raises(ValueError, match="takes 2 KV blocks, but only 1 are free"):
        make_manager(sink(8), num_blocks=2)


def test_unknown_spec():
    class OtherSpec(FullAttentionSpec):
        pass

    pool = make_manager(full()).block_pool
    other = OtherSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    with pytest.raises(KeyError):
        get_manager_for_kv_cache_spec(other, pool, True, 0)
    assert len(spec_manager_map) == 7


@pytest.mark.parametrize("spec", [window(8), chunked(8), mamba("all")])
def test_no_context_parallelism(spec):
    with pytest.raises(AssertionError, match="decode_context_parallel_size 2"):
        make_manager(spec, hash_block_size=8, dcp_world_size=2)


def test_chunks_must_begin_at_blocks():
    with pytest.raises(ConfigError, match=r"attention_chunk_size 6 is not a multiple.* 4"):
        make_manager(chunked(6))
