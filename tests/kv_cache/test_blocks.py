"""Blocks, the free queue and the hash map."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jubako.kv_cache import (
    BlockHashToBlockMap,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheBlocks,
)


def ids(blocks):
    return [block.block_id for block in blocks]


@pytest.fixture
def blocks():
    return [KVCacheBlock(i) for i in range(6)]


@pytest.fixture
def free(blocks):
    return FreeKVCacheBlockQueue(blocks)


def test_block_hash_is_set_once():
    block = KVCacheBlock(1)
    block.block_hash = b"a"
    with pytest.raises(AssertionError, match="block 1 already"):
        block.block_hash = b"a"
    block.reset_hash()
    block.reset_hash()
    assert block.block_hash is None
    block.block_hash = b"b"
    assert repr(block) == "KVCacheBlock(1, ref_cnt=0, block_hash=62)"


def test_queue(free, blocks):
    assert free.popleft() is blocks[0]
    assert ids(free.popleft_n(2)) == [1, 2]
    free.remove(blocks[4])
    assert ids(free.get_all_free_blocks()) == [3, 5]
    free.append(blocks[0])
    free.append_n([blocks[2], blocks[1]])
    assert ids(free.get_all_free_blocks()) == [3, 5, 0, 2, 1]
    assert free.num_free_blocks == 5
    with pytest.raises(RuntimeError, match="block 4 is not in the free queue"):
        free.remove(blocks[4])
    free.prepend_n([blocks[4]])
    assert ids(free.get_all_free_blocks()) == [4, 3, 5, 0, 2, 1]
    assert free.popleft_n(0) == []
    free.append_n([])
    free.prepend_n([])
    assert free.num_free_blocks == 6


def test_queue_errors(free, blocks):
    with pytest.raises(AssertionError, match="7 blocks wanted, 6 are free"):
        free.popleft_n(7)
    free.popleft_n(6)
    assert all(b.prev_free_block is b.next_free_block is None for b in blocks)
    with pytest.raises(ValueError, match="no free KV cache block"):
        free.popleft()
    free.num_free_blocks = 1
    with pytest.raises(AssertionError, match="1 free blocks are not linked"):
        free.popleft()
    free.num_free_blocks = 3
    with pytest.raises(AssertionError, match="shorter than its counter"):
        free.popleft_n(3)


def test_broken_links(free, blocks):
    blocks[0].next_free_block = None
    with pytest.raises(RuntimeError, match="block 0 has no next link"):
        free.popleft()
    free.fake_free_list_tail.prev_free_block = None
    with pytest.raises(RuntimeError, match="back has no link"):
        free.append(KVCacheBlock(9))
    with pytest.raises(AssertionError, match="back has no link"):
        free.append_n([KVCacheBlock(9)])
    free.fake_free_list_head.next_free_block = None
    with pytest.raises(AssertionError, match="front has no link"):
        free.prepend_n([KVCacheBlock(9)])


def test_empty_queue():
    free = FreeKVCacheBlockQueue([])
    assert free.get_all_free_blocks() == []
    with pytest.raises(ValueError, match="no free"):
        free.popleft()


@given(st.lists(st.tuples(st.sampled_from("pnrafb"), st.integers(0, 9)), max_size=60))
def test_queue_is_a_list(operations):
    blocks = [KVCacheBlock(i) for i in range(10)]
    free, model = FreeKVCacheBlockQueue(blocks), list(blocks)
    for operation, n in operations:
        out = [b for b in blocks if b not in model]
        if operation == "p" and model:
            assert free.popleft() is model.pop(0)
        elif operation == "n" and n <= len(model):
            assert free.popleft_n(n) == model[:n]
            del model[:n]
        elif operation == "r" and n < len(model):
            free.remove(model.pop(n))
        elif operation == "a" and out:
            free.append(out[0])
            model.append(out[0])
        elif operation == "f":
            free.prepend_n(out[:n])
            model = out[:n] + model
        elif operation == "b":
            free.append_n(out[:n])
            model += out[:n]
        assert free.get_all_free_blocks() == model
        assert free.num_free_blocks == len(model)


def test_hash_map():
    cache = BlockHashToBlockMap()
    b7, b3, b9 = (KVCacheBlock(i) for i in (7, 3, 9))
    assert cache.get_one_block(b"k") is None
    assert cache.pop(b"k", 7) is None
    assert cache.insert(b"k", b7)
    assert cache.pop(b"k", 55) is None
    assert not cache.insert(b"k", b3)
    assert not cache.insert(b"k", b9)
    assert len(cache) == 1
    assert cache.get_one_block(b"k") is b7
    assert cache.pop(b"k", 55) is None
    assert cache.pop(b"k", 7) is b7
    assert cache.get_one_block(b"k") is b3
    assert cache.pop(b"k", 3) is b3
    assert cache.get_one_block(b"k") is b9
    assert cache.pop(b"k", 9) is b9
    assert len(cache) == 0
    assert b"k" not in cache


def test_hash_map_refuses_strangers():
    cache = BlockHashToBlockMap()
    cache.of_group(b"k")[b""] = "what"
    for call in (
        lambda: cache.get_one_block(b"k"),
        lambda: cache.insert(b"k", KVCacheBlock(1)),
        lambda: cache.pop(b"k", 1),
    ):
        with pytest.raises(AssertionError, match="str in the block map"):
            call()


def test_kv_cache_blocks(blocks):
    null = blocks[0]
    null.is_null = True
    blocks[2].block_hash = b"x"
    one = KVCacheBlocks(([null, blocks[2], blocks[3]],))
    assert one.get_block_ids() == ([0, 2, 3],)
    assert one.get_unhashed_block_ids() == [0, 3]
    assert one.get_unhashed_block_ids_all_groups() == [[3]]
    two = KVCacheBlocks((blocks[1:2], ())) + KVCacheBlocks((blocks[2:3], blocks[4:]))
    assert two.get_block_ids() == ([1, 2], [4, 5])
    with pytest.raises(AssertionError, match="one group only, not 2"):
        two.get_unhashed_block_ids()
    empty = two.new_empty()
    assert empty.is_empty
    assert empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None
    assert two.get_block_ids(allow_none=True) == ([1, 2], [4, 5])
