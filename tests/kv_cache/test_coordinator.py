"""Several groups as one: the length of a hit in hybrid models."""

from __future__ import annotations

import pytest

from jubako.kv_cache import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)

from .fakes import admit, chunked, full, make_manager, mamba, request, step, window


def cached(*specs, tokens=32, steps=None, **kwargs):
    """A manager that has seen a prompt of `tokens`, computed in `steps`."""
    m = make_manager(*specs, **kwargs)
    a = request("a", tokens, hash_block_size=kwargs.get("hash_block_size", 4))
    for n in steps or [tokens]:
        step(m, a, n)
        m.new_step_starts()
    m.free(a)
    return m


def lookup(m, tokens, shared=None, extra=1, hash_block_size=4):
    """Hit of a prompt that shares `shared` tokens and has `extra` more."""
    prompt = [*range(tokens if shared is None else shared), *range(900, 900 + extra)]
    blocks, hit = m.get_computed_blocks(request("q", prompt, hash_block_size=hash_block_size))
    return hit, blocks.get_block_ids()


def block_of(m, group, index, tokens=64):
    req = request("x", tokens)
    return m.block_pool.get_cached_block(req.block_hashes[index], [group])[0].block_id


def test_kinds():
    assert type(make_manager(full()).coordinator) is UnitaryKVCacheCoordinator
    assert type(make_manager(full(), window(8)).coordinator) is HybridKVCacheCoordinator
    for m in (
        make_manager(full(), enable_caching=False),
        make_manager(full(), full(), enable_caching=False),
        make_manager(),
    ):
        assert type(m.coordinator) is KVCacheCoordinatorNoPrefixCache
        hits, length = m.coordinator.find_longest_cache_hit([], 10)
        assert length == 0
        assert all(hit == [] for hit in hits)
        assert m.get_num_common_prefix_blocks("a") == [0] * m.num_kv_cache_groups


def test_constructor_checks():
    with pytest.raises(AssertionError, match="hash_block_size 8 must be the block size 4"):
        make_manager(full(), hash_block_size=8)
    with pytest.raises(AssertionError, match="4 is not a multiple of hash_block_size 3"):
        make_manager(full(), window(8), hash_block_size=3)
    with pytest.raises(AssertionError, match="two different"):
        make_manager(full(), full())
    with pytest.raises(AssertionError, match="context parallelism"):
        make_manager(full(), full(8), hash_block_size=4, dcp_world_size=2)


def test_full_and_window():
    m = cached(full(), window(8))
    assert lookup(m, 32) == (32, ([*range(1, 9)], [0] * 6 + [15, 16]))
    m.evict_blocks({16})
    assert lookup(m, 32) == (28, ([*range(1, 8)], [0] * 5 + [14, 15]))


def test_full_and_two_windows():
    m = cached(full(), window(8), window(16), tokens=64)
    m.evict_blocks({block_of(m, 1, 9), block_of(m, 1, 14), block_of(m, 2, 10)})
    assert lookup(m, 64)[0] == 36


def test_larger_window_blocks():
    m = cached(full(), window(8, 8), tokens=28)
    assert lookup(m, 28) == (24, ([*range(1, 7)], [0, 0, 10]))
    assert lookup(m, 28, shared=22)[0] == 16


def test_block_sizes_without_a_common_multiple_but_the_product():
    m = cached(full(), window(8, 6), tokens=30, hash_block_size=2)
    assert lookup(m, 30, hash_block_size=2)[0] == 24


def test_full_and_chunked():
    m = cached(full(), chunked(8), tokens=22)
    assert lookup(m, 22, extra=0) == (20, ([1, 2, 3, 4, 5], [0, 0, 0, 0, 11]))
    m.evict_blocks({11})
    assert lookup(m, 22, extra=0) == (16, ([1, 2, 3, 4], [0, 0, 0, 0]))


def test_full_and_mamba():
    assert lookup(cached(full(), mamba(), tokens=24), 24, shared=16)[0] == 0
    assert lookup(cached(full(), mamba(), tokens=24, steps=[16, 8]), 24, shared=16)[0] == 16


def test_full_window_and_mamba():
    m = cached(full(), window(8), mamba(), steps=[16, 16])
    assert lookup(m, 32, shared=28)[0] == 16


def test_eagle():
    assert lookup(cached(full(), use_eagle=True), 32)[0] == 28
    assert lookup(cached(full(), window(8), use_eagle=True), 32)[0] == 28
    m = cached(full(), window(8), window(16), tokens=64, use_eagle=True)
    assert lookup(m, 64)[0] == 60


def test_eagle_with_larger_blocks():
    m = cached(full(), window(8, 8), use_eagle=True)
    assert lookup(m, 32)[0] == 24


def test_eagle_marked_group_only():
    m = cached(full(), window(8), use_eagle=True, eagle_groups={0})
    assert lookup(m, 32)[0] == 28


def test_common_prefix_of_each_group():
    m = make_manager(full(), window(8))
    a = request("a", 9)
    admit(m, a)
    assert m.get_num_common_prefix_blocks("a") == [3, 0]
