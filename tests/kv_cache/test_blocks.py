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
from jubako.kv_cache.hashing import group_suffix


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
    for block in (*blocks, KVCacheBlock(9)):
        with pytest.raises(RuntimeError, match=f"block {block.block_id} is not in the free queue"):
            free.remove(block)
    with pytest.raises(ValueError, match="no free KV cache block"):
        free.popleft()
    free.num_free_blocks = 3
    with pytest.raises(AssertionError, match="shorter than its counter"):
        free.popleft_n(3)


def test_a_long_life_leaves_a_short_queue(free, blocks):
    for _ in range(1000):
        free.append(free.popleft())
    assert ids(free.get_all_free_blocks()) == [4, 5, 0, 1, 2, 3]
    for _ in range(1000):
        free.remove(blocks[4])
        free.append(blocks[4])
    for _ in range(1000):
        free.prepend_n([free.popleft()])
        free.remove(blocks[2])
        free.prepend_n([blocks[2]])
    assert ids(free.get_all_free_blocks()) == [2, 5, 0, 1, 3, 4]
    assert len(free._line) < 300


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
    with pytest.raises(AssertionError, match="str in the block map"):
        cache.insert(b"k", "what")
    assert len(cache) == 0


def key(block_hash, group):
    return block_hash + group_suffix(group)


@given(
    st.lists(
        st.tuples(st.sampled_from("irpt"), st.integers(0, 5), st.integers(0, 2), st.integers(0, 9)),
        max_size=60,
    )
)
def test_hash_map_is_a_list_of_blocks_under_each_key(operations):
    """Rows of two groups, entered and taken one by one or together; a third comes later."""
    cache, model = BlockHashToBlockMap(), {}
    for group in range(2):
        cache.column_of(group_suffix(group))
    blocks = {i: KVCacheBlock(i) for i in range(1000)}
    unused = iter(range(1000))
    for operation, number, group, n in operations:
        block_hash = bytes([number])
        here = model.setdefault(key(block_hash, group), [])
        if operation == "i":
            block = blocks[next(unused)]
            assert cache.insert(key(block_hash, group), block) == (not here)
            here.append(block)
        elif operation == "r" and len(cache._columns) == 2:
            # Hashes may meet each other and what is there.
            hashes = [bytes([(number + i * (n % 3)) % 6]) for i in range(1 + n % 4)]
            columns = [[blocks[next(unused)] for _ in hashes] for _ in range(2)]
            cache.add_rows(hashes, columns)
            for own_group, column in enumerate(columns):
                for own_hash, block in zip(hashes, column):
                    model.setdefault(key(own_hash, own_group), []).append(block)
        elif operation == "p":
            block = here.pop(n % len(here)) if here else None
            block_id = block.block_id if block else 5000
            assert cache.pop(key(block_hash, group), block_id) is block
        elif operation == "t":
            assert cache.pop(key(block_hash, group), 5000) is None
        assert dict(cache.items()) == {k: v for k, v in model.items() if v}
        assert len(cache) == sum(1 for v in model.values() if v)
        for k, v in model.items():
            assert cache.get_one_block(k) is (v[0] if v else None)
        in_use = sorted([*cache._rows.values(), *cache._free_rows])
        assert in_use == list(range(1, cache._num_rows))


@given(st.sets(st.tuples(st.integers(0, 39), st.integers(0, 1))), st.integers(0, 9), st.booleans())
def test_runs_end_where_any_group_lacks_a_block(absent, start, together):
    cache = BlockHashToBlockMap()
    suffixes = [group_suffix(group) for group in range(2)]
    for suffix in suffixes:
        cache.column_of(suffix)
    hashes = [bytes([i]) for i in range(40)]
    columns = [[KVCacheBlock(100 * group + i) for i in range(40)] for group in range(2)]
    if together:
        cache.add_rows(hashes, columns)
    else:
        for i in reversed(range(40)):
            cache.add_rows(hashes[i : i + 1], [column[i : i + 1] for column in columns])
    for i, group in absent:
        assert cache.take(hashes[i], suffixes[group], columns[group][i].block_id)
    for groups in ([0], [1], [0, 1], [1, 0]):
        stop = next((i for i in range(start, 40) if {(i, g) for g in groups} & absent), 40)
        runs = cache.get_run(hashes, start, 50, [suffixes[group] for group in groups])
        assert runs == [columns[group][start:stop] for group in groups]


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
