"""Does the KV cache find in a real trace what an LRU cache written by definition finds?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import replay as script
from replay import BLOCK, LeastRecentlyUsed, Pool, Row, read_trace, replay

TRACE = Path(__file__).parent / "mooncake_conversation_400.jsonl"
ROWS = read_trace(TRACE)
LONGEST = max(-(-(row.input_length + row.output_length) // BLOCK) for row in ROWS)
EVERYTHING = sum(-(-(row.input_length + row.output_length) // BLOCK) for row in ROWS)
CAPACITIES = [LONGEST, 1000, 3000, 5000, 7000, EVERYTHING]


def row(number: int, ids: list[int], length: int | None = None, **kwargs: int) -> Row:
    return Row(
        number,
        kwargs.get("timestamp", 0),
        BLOCK * len(ids) - 1 if length is None else length,
        kwargs.get("output_length", 0),
        ids,
    )


def both(rows: list[Row], capacity: int, **kwargs: object) -> tuple[dict[int, int], int]:
    """The blocks that each row finds, in the pool as in the LRU, and the last blocks repeated."""
    lru = LeastRecentlyUsed(capacity)
    pool = replay(rows, Pool(capacity), capacity, **kwargs)
    expected = replay(rows, lru, capacity, **kwargs)
    assert pool == expected
    return pool.hits_by_row, lru.computed_again


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_request_of_the_trace_finds_the_blocks_that_an_lru_finds(
    capacity: int, overlap: bool
) -> None:
    lru = LeastRecentlyUsed(capacity)
    pool = replay(ROWS, Pool(capacity), capacity, overlap=overlap)
    expected = replay(ROWS, lru, capacity, overlap=overlap)
    assert lru.computed_again == 0, "the two need not agree on this trace"
    assert pool.hits_by_row == expected.hits_by_row
    assert pool == expected
    assert 0 < pool.hits < pool.looked_up
    assert pool.left_out == 0


def test_what_is_never_evicted_is_found_whenever_it_came_before() -> None:
    seen: set[int] = set()
    found = 0
    for each in ROWS:
        found += sum(block in seen for block in each.whole)
        seen.update(each.whole)
    assert replay(ROWS, Pool(EVERYTHING), EVERYTHING).hits == found


def test_capacity_decides_what_is_found() -> None:
    rates = [replay(ROWS, Pool(capacity), capacity).rate for capacity in CAPACITIES]
    assert rates == sorted(rates)
    assert rates[1] < rates[2] < rates[3] < rates[4] < rates[5]


def test_nothing_stays_in_use() -> None:
    pool = Pool(1000)
    replay(ROWS, pool, 1000, overlap=True)
    assert pool.manager.usage == 0
    assert pool.manager.block_pool.get_num_free_blocks() == 1000


def test_the_rest_of_a_prompt_is_never_found() -> None:
    hits, _ = both([row(0, [1, 2]), row(1, [1, 2])], capacity=10)
    assert hits == {0: 0, 1: 1}


def test_the_block_with_the_last_prompt_token_is_computed_again() -> None:
    whole = [row(0, [1, 2], 2 * BLOCK), row(1, [1, 2], 2 * BLOCK)]
    assert both(whole, capacity=10) == ({0: 0, 1: 1}, 1)


def test_a_prefix_outlives_what_continues_it() -> None:
    # Four blocks are cached; the next prompt takes three of six, which leaves a prefix of three.
    rows = [row(0, [1, 2, 3, 4], 4 * BLOCK), row(1, [5, 6, 7], 3 * BLOCK)]
    hits, _ = both([*rows, row(2, [1, 2, 3, 4, 8])], capacity=6)
    assert hits[2] == 3


def test_blocks_of_a_running_request_are_not_evicted() -> None:
    rows = [
        row(0, [1, 2], 2 * BLOCK, output_length=100),
        row(1, [3, 4], 2 * BLOCK, timestamp=1),
        row(2, [5, 6], 2 * BLOCK, timestamp=300),
        row(3, [1, 2, 7], timestamp=600),
    ]
    # While request 0 runs, the others have two blocks between them.
    hits, _ = both(rows, capacity=5, overlap=True)
    assert hits == {0: 0, 1: 0, 2: 0, 3: 2}
    hits, _ = both(rows, capacity=5)
    assert hits[3] < 2


def test_a_request_waits_until_its_blocks_are_free() -> None:
    rows = [row(0, [1, 2], output_length=100), row(1, [3, 4], timestamp=1)]
    tally = replay(rows, Pool(3), 3, overlap=True)
    assert (tally.delayed, tally.left_out) == (1, 0)


def test_a_request_larger_than_the_cache_is_left_out() -> None:
    tally = replay([row(0, [1, 2, 3]), row(1, [1])], Pool(2), 2)
    assert (tally.left_out, list(tally.hits_by_row)) == (1, [1])


def test_a_row_with_too_few_ids_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    fields = {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}
    path.write_text(json.dumps(fields) + "\n")
    with pytest.raises(ValueError, match=r"row 1: 1 hash_ids for 513 tokens"):
        read_trace(path)


def test_the_script_prints_a_line_for_each_capacity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay.py", str(TRACE), "--limit", "50", "--capacity", "300", "500"]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    head, titles, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("50 requests")
    assert titles.split()[:3] == ["blocks", "pool", "LRU"]
    assert [line.split()[0] for line in lines[:2]] == ["300", "500"]
    assert len(lines) == 3
    for line in lines:
        _, pool, lru, *_ = line.split()
        assert pool == lru
