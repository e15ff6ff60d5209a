"""Every token has one slot, in a block of its own request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.worker.block_table import (
    BlockTable,
    ContextParallel,
    MultiGroupBlockTable,
    select_kernel_block_size,
)


def slots(table: BlockTable, rows: list[int], positions: list[int]) -> list[int]:
    return table.compute_slot_mapping(np.array(rows, int), np.array(positions, int)).tolist()


def test_slots_of_two_rows() -> None:
    table = BlockTable(8, 2, 3, 64)
    table.add_row([6, 2, 9], 0)
    table.add_row([4, 11], 1)
    assert slots(table, [0, 0, 0, 1, 1], [7, 8, 17, 0, 9]) == [55, 16, 73, 32, 89]


def test_blocks_are_split_for_a_kernel_with_smaller_ones() -> None:
    table = BlockTable(48, 1, 2, 64, kernel_block_size=16)
    table.add_row([5, 2], 0)
    assert table.row(0).tolist() == [15, 16, 17, 6, 7, 8]
    assert slots(table, [0, 0, 0], [0, 20, 53]) == [240, 260, 101]


@pytest.mark.parametrize(
    ("interleave", "rank", "expected"),
    [
        (1, 0, [12, -1, 13, -1, 14, -1, 15, -1, 32, -1, 33, -1]),
        (2, 1, [-1, -1, 12, 13, -1, -1, 14, 15, -1, -1, 32, 33]),
    ],
)
def test_slots_under_context_parallelism(interleave: int, rank: int, expected: list[int]) -> None:
    table = BlockTable(4, 1, 2, 64, context_parallel=ContextParallel(2, rank, interleave))
    table.add_row([3, 8], 0)
    assert slots(table, [0] * 12, list(range(12))) == expected


@pytest.mark.parametrize(("interleave", "lengths"), [(1, [7, 6]), (4, [8, 5])])
def test_local_lengths(interleave: int, lengths: list[int]) -> None:
    assert [
        int(ContextParallel(2, rank, interleave).local_length(13)) for rank in (0, 1)
    ] == lengths


@given(
    world=st.integers(1, 4),
    interleave=st.sampled_from([1, 2, 4]),
    length=st.integers(0, 60),
)
@settings(max_examples=60, deadline=None)
def test_each_position_is_on_one_rank(world: int, interleave: int, length: int) -> None:
    blocks = [5, 2, 7, 1, 9, 3, 8, 4, 6, 10, 11, 12, 13, 14, 15]
    local = np.zeros((world, length), dtype=bool)
    lengths = 0
    for rank in range(world):
        parallel = ContextParallel(world, rank, interleave)
        table = BlockTable(4, 1, 15, 64, context_parallel=parallel)
        table.add_row(blocks, 0)
        got = np.array(slots(table, [0] * length, list(range(length))))
        local[rank] = got >= 0
        assert len(set(got[got >= 0])) == local[rank].sum()
        assert local[rank].sum() == parallel.local_length(length)
        lengths += int(parallel.local_length(length))
    assert (local.sum(axis=0) == 1).all()
    assert lengths == length


@given(blocks=st.permutations(range(12)), split=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_splitting_never_moves_a_token(blocks: list[int], split: int) -> None:
    whole = BlockTable(8, 1, 12, 128)
    parts = BlockTable(8, 1, 12, 128, kernel_block_size=8 // split)
    for table in (whole, parts):
        table.add_row(blocks, 0)
    positions = list(range(96))
    assert slots(whole, [0] * 96, positions) == slots(parts, [0] * 96, positions)
    entries = parts.row(0)[np.array(positions) // parts.kernel_block_size]
    assert (np.array(slots(parts, [0] * 96, positions)) // parts.kernel_block_size == entries).all()


def test_rows_are_appended_to_moved_and_swapped() -> None:
    table = BlockTable(8, 3, 4, 64)
    table.add_row([1, 2, 3], 0)
    table.append_row([4], 0)
    table.add_row([5], 1)
    table.swap_row(0, 1)
    assert [table.row(r).tolist() for r in range(3)] == [[5], [1, 2, 3, 4], []]
    table.move_row(1, 2)
    assert [table.row(r).tolist() for r in range(3)] == [[5], [], [1, 2, 3, 4]]
    table.add_row([9], 2)
    assert table.row(2).tolist() == [9]


def test_a_group_table_sends_each_group_its_own_ids() -> None:
    tables = MultiGroupBlockTable.build([4, 8], [4, 8], 2, 20, 64)
    assert [t.table.shape for t in tables] == [(2, 5), (2, 3)]
    tables.add_row(([1, 2], [7]), 0)
    tables.append_row(([3], []), 0)
    assert [t.row(0).tolist() for t in tables] == [[1, 2, 3], [7]]
    tables.compute_slot_mapping(np.array([0, 0]), np.array([0, 5]))
    assert tables[0].slot_mapping[:2].tolist() == [4, 9]
    assert tables[1].slot_mapping[:2].tolist() == [56, 61]


def test_context_parallelism_narrows_the_table_and_keeps_its_interleave() -> None:
    parallel = ContextParallel(2, 1, 2)
    tables = MultiGroupBlockTable.build([4, 4], [4, 4], 1, 32, 64, parallel)
    tables.add_row(([3, 8], [1, 2]), 0)
    tables.compute_slot_mapping(np.zeros(8, dtype=int), np.arange(8))
    assert tables[0].table.shape == (1, 4)
    assert tables[0].slot_mapping[:8].tolist() == [-1, -1, 12, 13, -1, -1, 14, 15]
    assert tables[1].slot_mapping[:8].tolist() == [-1, -1, 4, 5, -1, -1, 6, 7]


@pytest.mark.parametrize(
    ("block_size", "supported", "chosen"),
    [
        (32, [None, None], 32),
        (32, [[16, 32], None], 32),
        (48, [[16, 32], None], 16),
        (64, [[16, 32], [8, 16, 32]], 32),
        (64, [[16, 32], [8, 16]], 16),
    ],
)
def test_kernel_block_size(block_size: int, supported: list[list[int] | None], chosen: int) -> None:
    assert select_kernel_block_size(block_size, supported) == chosen


def test_no_common_kernel_block_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="KV blocks of 48 tokens"):
        select_kernel_block_size(48, [[32], None])


def test_a_kernel_size_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        BlockTable(48, 1, 1, 64, kernel_block_size=32)


class TestSinks:
    """Rows begin with the blocks of sink tokens, which stand before position 0."""

    def test_every_row_begins_with_them(self) -> None:
        table = BlockTable(8, 3, 3, 64, sink_blocks=[1, 2])
        assert table.num_sink_tokens == 16
        table.add_row([6, 4], 0)
        table.append_row([9], 0)
        assert table.row(0).tolist() == [1, 2, 6, 4, 9]
        assert table.row(1).tolist() == [1, 2]
        assert slots(table, [0, 0, 0], [0, 9, 17]) == [48, 33, 73]

    def test_rows_keep_them_when_they_move(self) -> None:
        table = BlockTable(8, 3, 3, 64, sink_blocks=[1])
        table.add_row([5, 6], 0)
        table.move_row(0, 2)
        assert [table.row(row).tolist() for row in range(3)] == [[1], [1], [1, 5, 6]]
        table.add_row([7], 0)
        table.swap_row(0, 2)
        assert [table.row(row).tolist() for row in range(3)] == [[1, 5, 6], [1], [1, 7]]
        table.clear_row(0)
        assert table.row(0).tolist() == [1]

    def test_the_longest_row_still_fits(self) -> None:
        table = BlockTable(8, 1, 3, 64, sink_blocks=[1, 2])
        table.add_row([3, 4, 5], 0)
        with pytest.raises(AssertionError):
            table.append_row([6], 0)

    def test_they_are_split_like_others(self) -> None:
        table = BlockTable(32, 1, 1, 64, kernel_block_size=16, sink_blocks=[1])
        table.add_row([4], 0)
        assert table.row(0).tolist() == [2, 3, 8, 9]
        assert slots(table, [0], [17]) == [9 * 16 + 1]

    def test_groups_have_their_own(self) -> None:
        tables = MultiGroupBlockTable.build([8, 8], [8, 8], 2, 16, 64, sink_blocks=[[], [1, 2]])
        tables.add_row([[5], [6]], 0)
        assert [table.row(0).tolist() for table in tables] == [[5], [1, 2, 6]]

    def test_ranks_that_share_a_context_are_refused(self) -> None:
        with pytest.raises(ValueError, match="Sink tokens"):
            BlockTable(8, 1, 3, 64, context_parallel=ContextParallel(2), sink_blocks=[1])
