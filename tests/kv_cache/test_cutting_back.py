"""What is left of a request's tables when some of its blocks turn out to be no good."""

from __future__ import annotations

import pytest

from .fakes import admit, chunked, full, make_manager, mamba, request, step, table, window


def test_truncating_frees_what_lies_behind_and_forgets_that_it_was_registered():
    m = make_manager(full(), num_blocks=13)
    a = request("a", 18)
    step(m, a, 18)
    assert (table(m, a), m.block_pool.get_num_free_blocks()) == ([1, 2, 3, 4, 5], 7)
    m.truncate("a", 8)
    a.num_computed_tokens = 8
    assert (table(m, a), m.block_pool.get_num_free_blocks()) == ([1, 2], 10)
    assert m.num_blocks_held("a") == 2
    assert m.num_blocks_to_finish(a) == 3
    # It goes on from there, and what it computes again is registered again.
    assert step(m, a, 10) is not None
    assert len(table(m, a)) == 5
    assert m.coordinator.single_type_managers[0].num_cached_block["a"] == 4
    m.truncate("unknown", 3)
    m.free(a)
    assert m.block_pool.get_num_free_blocks() == 12


def test_a_block_that_is_cut_off_half_way_stays():
    m = make_manager(full(), num_blocks=13)
    a = request("a", 16)
    step(m, a, 16)
    m.truncate("a", 6)
    assert len(table(m, a)) == 2
    assert m.coordinator.single_type_managers[0].num_cached_block["a"] == 1
    # It fills again, with what it is registered for already.
    a.num_computed_tokens = 6
    assert [len(row) for row in step(m, a, 10)] == [2]
    assert m.get_computed_blocks(request("b", 17))[1] == 16


def test_cutting_back_ends_a_common_prefix():
    m = make_manager(full(), num_blocks=13)
    a, b = request("a", 16), request("b", [*range(16), 5])
    admit(m, a)
    admit(m, b)
    assert m.get_num_common_prefix_blocks("a") == [4]
    m.truncate("b", 8)
    assert m.get_num_common_prefix_blocks("a") == [2]


@pytest.mark.parametrize(
    ("damaged", "length"), [(set(), 18), ({5}, 16), ({3}, 8), ({1}, 0), ({2, 4}, 4), ({99}, 18)]
)
def test_full_attention_keeps_what_stands_before_the_damage(damaged, length):
    m = make_manager(full(), num_blocks=13)
    step(m, request("a", 18), 18)
    assert m.longest_intact_prefix("a", 18, damaged, 4) == length


def test_a_window_must_be_there_as_a_whole():
    m = make_manager(full(), window(8), num_blocks=30)
    a = request("a", 30)
    step(m, a, 20)
    step(m, a, 10)
    blocks = m.get_block_ids("a")[1]
    assert blocks[:3] == [0, 0, 0]
    assert all(blocks[3:])
    assert m.longest_intact_prefix("a", 30, set(), 4) == 30
    # With 28 tokens the next one reads the last seven, which stand in the last two blocks.
    assert m.longest_intact_prefix("a", 30, {blocks[7]}, 4) == 28
    assert m.longest_intact_prefix("a", 30, {blocks[5]}, 4) == 20
    # Before that, the window has been let go.
    assert m.longest_intact_prefix("a", 30, {blocks[3]}, 4) in (0, 30)
    assert m.longest_intact_prefix("a", 18, {blocks[4]}, 4) == 0


def test_chunked_attention_reads_its_own_chunk_only():
    m = make_manager(full(), chunked(8), num_blocks=30)
    a = request("a", 22)
    step(m, a, 22)
    own = m.get_block_ids("a")[1]
    assert m.longest_intact_prefix("a", 22, {own[0], own[1]}, 4) == 22
    assert m.longest_intact_prefix("a", 22, {own[4]}, 4) == 16


def test_nothing_is_kept_of_a_state_that_is_no_good():
    m = make_manager(full(), mamba(), num_blocks=30)
    a = request("a", 16)
    step(m, a, 16)
    state = m.get_block_ids("a")[1][-1]
    assert m.longest_intact_prefix("a", 16, {state}, 4) == 0
