"""The longest hit of each attention type, from examples and against the definition."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.kv_cache import BlockPool, FullAttentionSpec, KVCacheSpec
from jubako.kv_cache.managers import spec_manager_map

from .fakes import NIGHTLY, chunked, full, make_manager, mamba, request, window
from .lookup import fill, needed_blocks, oracle

RUNS = settings(max_examples=5000 if NIGHTLY else 250, deadline=None)


def find(
    spec: KVCacheSpec,
    cached: list[Collection[int]],
    max_length: int,
    eagle: bool = False,
    alignment: int | None = None,
) -> list[list[int]]:
    pool = BlockPool(100, True, 4)
    req = request("a", 80)
    for group, indices in enumerate(cached):
        fill(pool, req, group, 4, indices)
    hits = spec_manager_map[type(spec)].find_longest_cache_hit(
        req.block_hashes, max_length, range(len(cached)), pool, spec, eagle, alignment or 4
    )
    assert len({len(hit) for hit in hits}) == 1
    return [[block.block_id for block in hit] for hit in hits]


@pytest.mark.parametrize(
    ("max_length", "eagle", "alignment", "found"),
    [
        (40, False, 4, 3),
        (11, False, 4, 2),
        (40, True, 4, 2),
        (40, False, 8, 2),
        (40, True, 8, 2),
        (40, False, 12, 3),
    ],
)
def test_full(max_length, eagle, alignment, found):
    assert find(full(), [{0, 1, 2, 4}], max_length, eagle, alignment) == [[1, 2, 3][:found]]


def test_full_two_groups():
    assert find(full(), [{0, 1, 2}, {0, 1}], 40) == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    ("sliding_window", "cached", "max_length", "eagle", "alignment", "ids"),
    [
        (8, {0, 1, 4, 5, 7}, 40, False, 4, [0, 0, 0, 0, 3, 4]),
        (8, {0, 1, 4, 5, 7}, 23, False, 4, [1, 2]),
        (20, {0, 1, 2, 4}, 40, False, 4, [1, 2, 3]),
        (12, {0, 2, 3}, 40, False, 4, [1]),
        (8, {2, 3, 4}, 40, False, 8, [0, 0, 1, 2]),
        (8, {2, 3, 4, 5}, 40, True, 4, [0, 0, 0, 2, 3]),
        (8, {3, 4}, 40, True, 4, []),
        # One token needs no block, but one is asked for.
        (1, {3}, 40, False, 4, [0, 0, 0, 1]),
        (1, set(), 40, False, 4, []),
    ],
)
def test_window(sliding_window, cached, max_length, eagle, alignment, ids):
    assert find(window(sliding_window), [cached], max_length, eagle, alignment) == [ids]


@pytest.mark.parametrize(
    ("max_length", "ids"),
    [(15, [0, 0, 3]), (16, [0, 0, 0, 0]), (13, [0, 0, 3]), (7, [1])],
)
def test_chunked(max_length, ids):
    assert find(chunked(8), [{0, 1, 2, 3}], max_length)[0][: len(ids)] == ids
    assert len(find(chunked(8), [{0, 1, 2, 3}], max_length)[0]) == len(ids)


def test_chunked_alignment_reaches_an_earlier_chunk():
    # 12 tokens would need block 2 alone; 8 is a border.
    assert find(chunked(8), [{2}], 15, alignment=8) == [[0, 0]]
    assert find(chunked(24), [{0, 1}], 23, alignment=16) == [[]]
    with pytest.raises(AssertionError, match="EAGLE"):
        find(chunked(8), [{0}], 8, eagle=True)


@pytest.mark.parametrize(
    ("max_length", "alignment", "ids"),
    [(40, 4, [0, 0, 0, 0, 2]), (19, 4, [0, 1]), (40, 8, [0, 1])],
)
def test_mamba(max_length, alignment, ids):
    assert find(mamba(), [{1, 4}], max_length, alignment=alignment) == [ids]


INDICES = st.sets(st.integers(0, 19), max_size=20)


@RUNS
@given(
    st.sampled_from([full(), *map(window, (1, 2, 5, 8, 13, 40)), chunked(4), chunked(12), mamba()]),
    st.lists(INDICES, min_size=1, max_size=2),
    st.integers(0, 82),
    st.booleans(),
)
def test_single_type_equals_definition(spec, cached, max_length, eagle):
    if type(spec) in (type(chunked(8)), type(mamba())):
        eagle = False
    hits = find(spec, cached, max_length, eagle)
    both = set.intersection(*cached)
    length = oracle([spec], [both], min(max_length, 80), {0} if eagle else ())
    for hit, indices in zip(hits, cached):
        assert len(hit) * 4 == length
        real = {i for i, block_id in enumerate(hit) if block_id}
        assert real == set(needed_blocks(spec, length))
        assert real <= indices


def test_window_lookups_jump():
    """A miss costs one lookup a window, not one a block."""
    pool = BlockPool(10, True, 4)
    req = request("a", 4 * 1000)
    seen = []
    get = pool.get_cached_block
    pool.get_cached_block = lambda block_hash, ids: seen.append(block_hash) or get(block_hash, ids)
    hits = spec_manager_map[type(window(8))].find_longest_cache_hit(
        req.block_hashes, 4000, [0], pool, window(41), False, 4
    )
    assert hits == ([],)
    assert len(seen) <= 1000 / 10 + 10


MIXES = [
    [full(), window(8)],
    [full(), window(8), window(16)],
    [full(), window(8), window(8)],
    [full(4), full(8), window(8)],
    [full(4), window(8, 8)],
    [full(8), window(8, 4)],
    [full(4), window(8, 6)],
    [window(5), window(13)],
    [window(8, 8), window(20, 4), full(4)],
    [full(), chunked(8)],
    [full(), chunked(8), window(12)],
    [full(8), chunked(8, 4)],
    [full(), mamba()],
    [full(), window(8), mamba()],
    [full(8), mamba()],
    [window(8), mamba("all")],
]


def hybrid(specs, cached, max_length, eagle_groups=None):
    hash_size = 2 if any(spec.block_size == 6 for spec in specs) else 4
    m = make_manager(
        *specs,
        num_blocks=200,
        hash_block_size=hash_size,
        use_eagle=eagle_groups is not None,
        eagle_groups=eagle_groups or frozenset(),
    )
    req = request("a", 72, hash_block_size=hash_size)
    for group, (spec, indices) in enumerate(zip(specs, cached)):
        fill(m.block_pool, req, group, spec.block_size, indices)
    hits, length = m.coordinator.find_longest_cache_hit(req.block_hashes, max_length)
    return m, req, hits, length


@RUNS
@given(st.data())
def test_hybrid_equals_definition(data):
    specs = data.draw(st.sampled_from(MIXES))
    # Mostly cached: otherwise nearly every answer is 0.
    missing = st.sets(st.integers(0, 17), max_size=4)
    cached = [set(range(72 // spec.block_size)) - data.draw(missing) for spec in specs]
    max_length = data.draw(st.integers(0, 71))
    eagle_groups = None
    if not any(type(spec) is type(chunked(8)) for spec in specs) and data.draw(st.booleans()):
        eagle_groups = data.draw(st.sets(st.integers(0, len(specs) - 1)))
    m, req, hits, length = hybrid(specs, cached, max_length, eagle_groups)
    marked = eagle_groups
    if eagle_groups is not None and not eagle_groups:
        marked = set(range(len(specs)))
    assert length == oracle(specs, cached, max_length, marked or ())
    for group, (spec, hit) in enumerate(zip(specs, hits)):
        assert len(hit) * spec.block_size == length
        needed = set(needed_blocks(spec, length))
        scale = spec.block_size // m.block_pool.hash_block_size
        for index, block in enumerate(hit):
            if block.is_null:
                assert index not in needed
            else:
                own = req.block_hashes[(index + 1) * scale - 1]
                assert block.block_hash == own + group.to_bytes(4, "big")


def test_full_spec_is_required():
    with pytest.raises(AssertionError):
        spec_manager_map[FullAttentionSpec].find_longest_cache_hit(
            [], 4, [0], BlockPool(4, True, 4), window(8), False, 4
        )
