"""What a model with several groups has of a request, group by group, and tables with gaps."""

from __future__ import annotations

import pytest

from tests.kv_cache.fakes import (
    admit,
    chunked,
    full,
    make_manager,
    mamba,
    queue,
    request,
    step,
    table,
    window,
)
from tests.kv_cache.lookup import fill


def test_a_group_says_what_it_needs_and_what_it_lacks():
    specs = full(16), window(40, 16), mamba("all", 0, 64)
    manager = make_manager(*specs, hash_block_size=16)
    req = request("r", 300, hash_block_size=16)
    present = [range(16), [8, 9, 10, 11, 15], [0, 2]]
    for group, (spec, cached) in enumerate(zip(specs, present)):
        fill(manager.block_pool, req, group, spec.block_size, cached)
    local = manager.get_local_blocks(req)
    assert [group.block_size for group in local] == [16, 16, 64]
    assert [group.needed(192) for group in local] == [range(12), range(9, 12), range(2, 3)]
    assert [group.missing(192) for group in local] == [[], [], []]
    assert [group.missing(256) for group in local] == [[], [13, 14], [3]]
    assert [group.missing(128) for group in local] == [[], [5, 6, 7], [1]]
    assert [group.missing(64) for group in local] == [[], [1, 2, 3], []]
    assert manager.get_computed_blocks(req)[1] == 192
    assert 15 in local[0]
    assert 16 not in local[0]
    assert -1 not in local[0]


def test_of_a_chunk_border_nothing_before_it_is_needed():
    manager = make_manager(full(), chunked(8))
    groups = manager.get_local_blocks(request("r", 30))
    assert groups[1].needed(16) == range(4, 4)
    assert groups[1].missing(20) == [4]


def test_a_block_that_the_request_goes_on_to_write_is_not_shared():
    manager = make_manager(full(), window(8))
    req = request("r", 30)
    fill(manager.block_pool, req, 0, 4, range(7))
    (group, _) = manager.get_local_blocks(req)
    assert group.missing(10) == [2]
    assert [block.block_id for block in group.entries(10)] == [1, 2, 0]
    # The last token is computed in any case, and ends a block of its own.
    whole = request("whole", 28)
    assert [6 in g for g in manager.get_local_blocks(whole)] == [False, False]
    assert 5 in manager.get_local_blocks(whole)[0]


def test_without_a_prefix_cache_nothing_is_here():
    manager = make_manager(full(), window(8), enable_caching=False)
    assert manager.get_local_blocks(request("r", 30))[0].missing(8) == [0, 1]


@pytest.mark.parametrize("has_room", [True, False])
def test_gaps_are_filled_with_new_blocks_and_counted_before(has_room: bool):
    manager = make_manager(full(), window(8), num_blocks=30)
    req = request("r", 30)
    fill(manager.block_pool, req, 0, 4, [0, 1, 3, 5])
    fill(manager.block_pool, req, 1, 4, [3])
    manager.block_pool.free_blocks(manager.block_pool.blocks[i] for i in (4, 3, 2, 1, 5))
    local = manager.get_local_blocks(req)
    hits = manager.create_kv_cache_blocks([group.entries(24) for group in local])
    assert [group.missing(24) for group in local] == [[2, 4], [4, 5]]
    # Four are revived and four are new; the fifth is not read any more, so it may be one of these.
    free = manager.block_pool.get_num_free_blocks()
    spare = manager.block_pool.get_new_blocks(free - (8 if has_room else 7))
    arguments = {
        "num_new_computed_tokens": 0,
        "new_computed_blocks": hits,
        "num_external_computed_tokens": 24,
        "delay_cache_blocks": True,
    }
    blocks = manager.allocate_slots(req, 0, **arguments)
    if not has_room:
        assert blocks is None
        assert queue(manager)[-5:] == [4, 3, 2, 1, 5]
        return
    assert blocks is not None
    assert manager.block_pool.get_num_free_blocks() == 0
    first, second = table(manager, req), table(manager, req, 1)
    assert [first[i] for i in (0, 1, 3, 5)] == [1, 2, 3, 4]
    assert second[:4] == [0, 0, 0, 0]
    new = {first[2], first[4], second[4], second[5]}
    assert len(new) == 4
    assert not new & {0, 1, 2, 3, 4}
    # What is not known to be good is not found, and then everything is.
    probe = request("probe", 30)
    assert manager.get_computed_blocks(probe)[1] == 0
    manager.cache_blocks(req, 24)
    assert manager.get_computed_blocks(probe)[1] == 24
    req.num_computed_tokens = 24
    manager.block_pool.free_blocks(spare)
    assert manager.allocate_slots(req, 6) is not None
    manager.free(req)
    assert manager.usage == 0
    assert admit(manager, probe) == 28


def test_a_gap_of_a_recurrent_group_is_its_last_state():
    manager = make_manager(full(), mamba("align"), num_blocks=20)
    req = request("r", 30)
    fill(manager.block_pool, req, 0, 4, range(4))
    fill(manager.block_pool, req, 1, 4, [2])
    manager.block_pool.free_blocks(manager.block_pool.blocks[5:0:-1])
    hits = manager.create_kv_cache_blocks(
        [group.entries(16) for group in manager.get_local_blocks(req)]
    )
    assert hits.get_block_ids() == ([1, 2, 3, 4], [0, 0, 0, 0])
    free = manager.block_pool.get_num_free_blocks()
    # Here 12 tokens could be gone on from; 4 more come, whose attention is here already.
    blocks = manager.allocate_slots(
        req,
        0,
        num_new_computed_tokens=12,
        new_computed_blocks=hits,
        num_external_computed_tokens=4,
        delay_cache_blocks=True,
    )
    assert blocks is not None
    assert free - manager.block_pool.get_num_free_blocks() == 5
    assert table(manager, req, 1)[:3] == [0, 0, 0]
    manager.cache_blocks(req, 16)
    assert manager.get_computed_blocks(request("probe", 30))[1] == 16


@pytest.mark.parametrize(
    ("num_tokens", "external", "added", "entries"),
    [(6, 5, [1], [0, 1]), (11, 3, [2, 3], [1, 2, 3]), (11, 8, [1], [0, 0, 1])],
)
def test_to_a_window_of_one_token_nothing_that_is_brought_matters(
    num_tokens, external, added, entries
):
    manager = make_manager(window(1))
    req = request("r", num_tokens)
    new = manager.allocate_slots(req, num_tokens - external, num_external_computed_tokens=external)
    assert new is not None
    assert new.get_block_ids() == (added,)
    assert table(manager, req) == entries


def test_the_block_that_the_request_writes_next_is_no_gap_though_nothing_in_it_is_read():
    manager = make_manager(full(), window(1))
    req = request("r", 14)
    local = manager.get_local_blocks(req)
    hits = manager.create_kv_cache_blocks([group.entries(13) for group in local])
    free = manager.block_pool.get_num_free_blocks()
    blocks = manager.allocate_slots(
        req,
        1,
        new_computed_blocks=hits,
        num_external_computed_tokens=13,
        delay_cache_blocks=True,
    )
    assert blocks is not None
    assert [bool(block_id) for block_id in table(manager, req, 1)] == [False, False, False, True]
    assert free - manager.block_pool.get_num_free_blocks() == 5
    req.num_computed_tokens, req.awaits_admission = 13, False
    manager.free(req)
    assert manager.usage == 0


def test_the_state_that_is_brought_is_counted_before():
    manager = make_manager(full(), mamba("align"), num_blocks=20)
    req = request("r", 30)
    fill(manager.block_pool, req, 0, 4, range(4))
    manager.block_pool.free_blocks(manager.block_pool.blocks[4:0:-1])
    # Four blocks are revived; a fifth is for the state, and is not there.
    manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks() - 4)
    hits = manager.create_kv_cache_blocks(
        [group.entries(16) for group in manager.get_local_blocks(req)]
    )
    blocks = manager.allocate_slots(
        req,
        0,
        new_computed_blocks=hits,
        num_external_computed_tokens=16,
        delay_cache_blocks=True,
    )
    assert blocks is None


def test_gaps_may_be_registered_by_a_later_step():
    """Groups that are otherwise alike have gaps at different places."""
    manager = make_manager(full(), window(8), window(8), num_blocks=60)
    req = request("r", 30)
    fill(manager.block_pool, req, 0, 4, [0, 2])
    fill(manager.block_pool, req, 1, 4, [5])
    fill(manager.block_pool, req, 2, 4, [4])
    manager.block_pool.free_blocks(manager.block_pool.blocks[4:0:-1])
    hits = manager.create_kv_cache_blocks(
        [group.entries(24) for group in manager.get_local_blocks(req)]
    )
    assert manager.allocate_slots(
        req,
        0,
        new_computed_blocks=hits,
        num_external_computed_tokens=24,
        delay_cache_blocks=True,
    )
    req.num_computed_tokens, req.awaits_admission = 24, False
    for _ in range(6):
        assert step(manager, req, 1) is not None
    assert manager.get_computed_blocks(request("probe", 30))[1] == 28
    manager.free(req)
    assert manager.usage == 0


def test_a_decode_registers_the_gap_that_one_group_had():
    manager = make_manager(full(), window(8))
    req = request("r", 9)
    fill(manager.block_pool, req, 0, 4, [0, 1])
    fill(manager.block_pool, req, 1, 4, [0])
    hits = manager.create_kv_cache_blocks(
        [group.entries(8) for group in manager.get_local_blocks(req)]
    )
    assert manager.allocate_slots(
        req, 0, new_computed_blocks=hits, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    req.num_computed_tokens, req.awaits_admission = 8, False
    new_block_ids = {}
    assert manager.grow_decodes([req], new_block_ids)
    assert [len(ids) for ids in new_block_ids["r"]] == [1, 1]
    assert manager.get_computed_blocks(request("probe", 9))[1] == 8
