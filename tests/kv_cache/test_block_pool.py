"""The pool: handing out, sharing, finding and forgetting blocks."""

from __future__ import annotations

import pytest

from jubako.kv_cache import BlockPool
from jubako.kv_cache.recent_blocks import RecentBlocks

from .fakes import request


def ids(blocks):
    return [block.block_id for block in blocks]


def queue(pool):
    return ids(pool.free_block_queue.get_all_free_blocks())


def registered(pool, req, group=0, n=None):
    """A table of `req`, all of it findable."""
    n = len(req.block_hashes) if n is None else n
    blocks = pool.get_new_blocks(n)
    pool.cache_full_blocks(req, blocks, 0, n, 4, group)
    return blocks


@pytest.mark.parametrize("n", [0, -1, 2.5, None])
def test_size_is_checked(n):
    with pytest.raises(AssertionError, match=f"num_gpu_blocks is {n}"):
        BlockPool(n, True, 4)


def test_trace():
    pool = BlockPool(6, True, 4)
    assert pool.null_block.block_id == 0
    assert pool.null_block.is_null
    blocks = pool.get_new_blocks(3)
    assert ids(blocks) == [1, 2, 3]
    assert pool.get_usage() == pytest.approx(0.6)
    with pytest.raises(ValueError, match="3 KV blocks wanted, but 2 are free"):
        pool.get_new_blocks(3)
    assert pool.get_num_free_blocks() == 2
    pool.free_blocks(reversed(blocks))
    assert queue(pool) == [4, 5, 3, 2, 1]


def test_null_block_alone():
    pool = BlockPool(1, True, 4)
    assert pool.get_usage() == 0
    assert pool.get_num_free_blocks() == 0
    assert pool.reset_prefix_cache()


def test_lookup_needs_all_groups():
    pool = BlockPool(10, True, 4)
    req = request("a", 8)
    first = registered(pool, req, group=0)
    assert pool.get_cached_block(req.block_hashes[1], [0]) == [first[1]]
    assert pool.get_cached_block(req.block_hashes[1], [0, 1]) is None
    second = registered(pool, req, group=1)
    assert pool.get_cached_block(req.block_hashes[1], [0, 1]) == [first[1], second[1]]
    # The oldest copy is found first.
    registered(pool, req, group=0)
    assert pool.get_cached_block(req.block_hashes[1], [0]) == [first[1]]


def test_registering():
    pool = BlockPool(10, True, 4)
    req = request("a", 14)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(req, blocks, 2, 2, 4, 0)
    pool.cache_full_blocks(req, blocks, 0, 2, 4, 0)
    assert [b.block_hash is not None for b in blocks] == [True, True, False]
    with pytest.raises(AssertionError, match="already has a hash"):
        pool.cache_full_blocks(req, blocks, 1, 3, 4, 0)
    pool.cache_full_blocks(req, [pool.null_block, *blocks[1:]], 2, 3, 4, 0)
    with pytest.raises(AssertionError, match="4 full blocks, but only 3 block hashes"):
        pool.cache_full_blocks(req, [*blocks, *pool.get_new_blocks(1)], 3, 4, 4, 0)
    with pytest.raises(AssertionError, match="block size 6 is no multiple of 4"):
        pool.cache_full_blocks(req, blocks, 0, 1, 6, 0)


def test_larger_blocks_are_measured_at_their_own_size():
    pool = BlockPool(10, True, 4)
    req = request("a", 20)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(req, blocks, 0, 2, 8, 0)
    assert blocks[1].block_hash == req.block_hashes[3] + bytes(4)
    with pytest.raises(AssertionError, match="3 full blocks, but only 2"):
        pool.cache_full_blocks(req, blocks, 2, 3, 8, 0)


def test_reallocation_evicts():
    pool = BlockPool(4, True, 4)
    req = request("a", 8)
    pool.free_blocks(registered(pool, req))
    assert queue(pool) == [3, 1, 2]
    assert pool.blocks[1].block_hash is not None
    blocks = pool.get_new_blocks(2)
    assert ids(blocks) == [3, 1]
    assert pool.get_cached_block(req.block_hashes[0], [0]) is None
    assert pool.get_cached_block(req.block_hashes[1], [0]) == [pool.blocks[2]]


def test_touch():
    pool = BlockPool(5, True, 4)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    assert queue(pool) == [3, 4, 1, 2]
    pool.touch([pool.blocks[1], pool.null_block])
    pool.touch([pool.blocks[1]])
    assert queue(pool) == [3, 4, 2]
    assert pool.blocks[1].ref_cnt == 2
    assert pool.null_block not in pool.free_block_queue.get_all_free_blocks()


def test_unhashed_blocks_first():
    pool = BlockPool(8, True, 4, free_unhashed_first=True)
    req = request("a", 8)
    blocks = [*registered(pool, req), *pool.get_new_blocks(2)]
    pool.free_blocks(reversed(blocks))
    assert queue(pool) == [4, 3, 5, 6, 7, 2, 1]


def test_double_free():
    pool = BlockPool(10, True, 4)
    a, b = pool.get_new_blocks(2)
    before = queue(pool)
    for wrong in ([a, b, a], [a, a], [b, pool.blocks[5]]):
        with pytest.raises(AssertionError, match="released twice"):
            pool.free_blocks(wrong)
        assert (queue(pool), a.ref_cnt, b.ref_cnt) == (before, 1, 1)
    pool.touch([a])
    pool.free_blocks([a, a])
    assert queue(pool) == [*before, 1]
    with pytest.raises(AssertionError, match="block 1 is released twice"):
        pool.free_blocks([a])
    pool.free_blocks([pool.null_block, pool.null_block])
    assert queue(pool) == [*before, 1]


def test_evict_blocks():
    pool = BlockPool(10, True, 4)
    req = request("a", 8)
    blocks = registered(pool, req)
    for wrong in ({1, 10}, {-1, 1}):
        with pytest.raises(AssertionError, match="is not in 0 to 9"):
            pool.evict_blocks(wrong)
        assert blocks[0].block_hash is not None
    pool.evict_blocks({0, 1, 7})
    assert blocks[0].block_hash is None
    assert blocks[0].ref_cnt == 1
    assert not pool._maybe_evict_cached_block(blocks[0])
    assert pool._maybe_evict_cached_block(blocks[1])


def test_block_that_the_map_does_not_know():
    pool = BlockPool(4, True, 4)
    (block,) = pool.get_new_blocks(1)
    block.block_hash = b"nowhere" + bytes(4)
    assert not pool._maybe_evict_cached_block(block)


def test_reset(caplog):
    pool = BlockPool(6, True, 4)
    req = request("a", 8)
    blocks = registered(pool, req)
    assert not pool.reset_prefix_cache()
    assert "2 blocks are in use" in caplog.text
    pool.free_blocks(blocks)
    order = queue(pool)
    assert pool.reset_prefix_cache()
    assert queue(pool) == order
    assert len(pool.cached_block_hash_to_block) == 0
    assert all(b.block_hash is None for b in pool.blocks)


def test_reserved_blocks():
    pool = BlockPool(6, True, 4)
    assert ids(pool.reserve_blocks(2)) == [1, 2]
    assert pool.get_usage() == 0
    assert pool.reset_prefix_cache()
    pool.get_new_blocks(3)
    assert pool.get_usage() == 1
    with pytest.raises(ValueError, match="1 KV blocks to reserve, but 0 are free"):
        pool.reserve_blocks(1)


def test_registered_ids():
    pool = BlockPool(6, True, 4)
    registered(pool, request("a", 8))
    assert pool.take_registered_block_ids() == [1, 2]
    assert pool.take_registered_block_ids() == []


def test_new_ids():
    pool = BlockPool(6, True, 4)
    first = pool.get_new_blocks(2)
    pool.free_blocks(first)
    pool.get_new_blocks(3)
    assert pool.take_new_block_ids() == [1, 2, 3, 4, 5]
    assert pool.take_new_block_ids() == []
    pool.free_blocks(pool.blocks[3:6])
    pool.get_new_blocks(1)
    assert pool.take_new_block_ids() == [1]


def test_ids_that_nobody_takes_do_not_pile_up():
    recent = RecentBlocks(4)
    blocks = BlockPool(4, True, 4).blocks
    for _ in range(100):
        recent.add(blocks[1:])
        assert sum(map(len, recent._runs)) <= 8
    assert recent.take() == [1, 2, 3]


def test_without_caching_nothing_is_evicted(monkeypatch):
    pool = BlockPool(4, False, 4)
    monkeypatch.setattr(pool, "_maybe_evict_cached_block", None)
    pool.free_blocks(pool.get_new_blocks(3))
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
