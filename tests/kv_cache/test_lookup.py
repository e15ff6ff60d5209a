"""The longest hit of each attention type, from examples and against the definition."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.kv_cache import (
    BlockPool,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    get_block_hash,
    get_group_id,
)
from jubako.kv_cache.managers import spec_manager_map

from .fakes import (
    ATTENTION,
    NIGHTLY,
    admit,
    chunked,
    full,
    make_manager,
    mamba,
    request,
    sink,
    step,
    window,
)
from .lookup import fill, needed_blocks, oracle


def label(spec: KVCacheSpec) -> str:
    return f"{type(spec).__name__.replace('Spec', '')}{spec.block_size}"


RUNS = settings(max_examples=5000 if NIGHTLY else 250, deadline=None)


def find(
    spec: KVCacheSpec,
    cached: list[Collection[int]],
    max_length: int,
    eagle: bool = False,
    alignment: int = 4,
    ranks: tuple[int, int] = (1, 1),
) -> list[list[int]]:
    """Ids that are found for a prompt of 20 blocks, when each group has those given."""
    size = spec.block_size * prod(ranks)
    pool = BlockPool(100, True, size)
    if isinstance(spec, MambaSpec):
        pool.index_states(0)
    req = request("a", 20 * size, hash_block_size=size)
    for group, indices in enumerate(cached):
        fill(pool, req, group, size, indices)
    hits = spec_manager_map[type(spec)].find_longest_cache_hit(
        req.block_hashes, max_length, range(len(cached)), pool, spec, eagle, alignment, *ranks
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


MLA = MLAAttentionSpec(block_size=4, **ATTENTION)
SINGLE = [
    full(),
    MLA,
    sink(8),
    *map(window, (1, 2, 5, 8, 13, 40)),
    chunked(4),
    chunked(12),
    mamba(),
    mamba("all"),
]


@RUNS
@given(
    st.sampled_from(SINGLE),
    st.lists(INDICES, min_size=1, max_size=3),
    st.integers(0, 82),
    st.booleans(),
    st.sampled_from([4, 4, 8, 12, 20]),
)
def test_single_type_equals_definition(spec, cached, max_length, eagle, alignment):
    if isinstance(spec, (ChunkedLocalAttentionSpec, MambaSpec)):
        eagle = False
    hits = find(spec, cached, max_length, eagle, alignment)
    in_all = set.intersection(*cached)
    length = oracle([spec], [in_all], min(max_length, 80), {0} if eagle else (), alignment)
    for hit, indices in zip(hits, cached):
        assert len(hit) * 4 == length
        real = {i for i, block_id in enumerate(hit) if block_id}
        assert real == set(needed_blocks(spec, length))
        assert real <= indices


class CountingDict(dict):
    """Counts the keys that are asked for."""

    asked = 0

    def get(self, key, default=None):
        self.asked += 1
        return super().get(key, default)


def asked(pool, spec, length, alignment=4):
    """Keys that a lookup of `length` tokens asks for, and the number of tokens it finds."""
    cache = pool.cached_block_hash_to_block
    cache._rows = counting = CountingDict(cache._rows)
    req = request("a", length)
    hits = spec_manager_map[type(spec)].find_longest_cache_hit(
        req.block_hashes, length, [0], pool, spec, False, alignment
    )
    return counting.asked, len(hits[0]) * 4


@RUNS
@given(
    st.sampled_from([full(), MLA]),
    st.lists(INDICES, min_size=1, max_size=2),
    st.integers(0, 20 * 16 + 2),
    st.booleans(),
    st.sampled_from([(2, 1), (1, 2), (2, 2), (4, 1)]),
)
def test_context_parallel_equals_definition(spec, cached, max_length, eagle, ranks):
    """A block of all ranks together is the unit."""
    whole = spec.copy_with_new_block_size(4 * prod(ranks))
    hits = find(spec, cached, max_length, eagle, whole.block_size, ranks)
    in_all = set.intersection(*cached)
    limit = min(max_length, 20 * whole.block_size)
    length = oracle([whole], [in_all], limit, {0} if eagle else ())
    assert {len(hit) * whole.block_size for hit in hits} == {length}


def test_window_lookups_jump():
    """A miss costs one lookup a window, not one a block."""
    assert asked(BlockPool(10, True, 4), window(41), 4000) == (1000 / 10, 0)


def test_full_lookups_stop_soon_after_the_first_miss():
    pool = BlockPool(300, True, 4)
    fill(pool, request("a", 4000), 0, 4, range(200))
    count, found = asked(pool, full(), 4000)
    assert found == 800
    assert count <= 2 * 200 + 32
    assert asked(BlockPool(10, True, 4), full(), 4000) == (1, 0)


def test_state_lookups_pass_over_empty_stretches():
    pool = BlockPool(30, True, 4)
    pool.index_states(0)
    prompt = request("a", 4 * 3000)
    fill(pool, prompt, 0, 4, {5, 1000})
    # Others have states where this prompt has none.
    for i in range(10):
        other = request(f"x{i}", [*range(4 * 2000), 7, *range(3999)])
        fill(pool, other, 0, 4, {2500 + i})
    count, found = asked(pool, mamba(), 4 * 3000)
    assert found == 4004
    assert count <= 17
    assert asked(pool, mamba(), 4 * 1000)[1] == 24
    pool.evict_blocks(range(30))
    assert asked(pool, mamba(), 4 * 3000) == (0, 0)


def test_states_of_larger_blocks_are_indexed():
    """Hashes are of 4 tokens, states every 8."""
    m = make_manager(full(), mamba(block_size=8), num_blocks=600, max_model_len=2000)
    prompt = request("a", 8 * 200)
    fill(m.block_pool, prompt, 0, 4, range(400))
    fill(m.block_pool, prompt, 1, 8, {3, 90, 150})
    assert [m.get_computed_blocks(request("q", n))[1] for n in (1400, 1200, 1000, 60)] == [
        1208,
        728,
        728,
        32,
    ]
    # A prompt that leaves the others' way in between.
    other = [*range(8 * 120), *range(9000, 9000 + 8 * 80)]
    assert m.get_computed_blocks(request("o", other))[1] == 728


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
    [full(), window(8), window(13), chunked(8)],
    [full(4), full(8), window(8, 8), mamba()],
    [full(8), window(6, 4), window(20, 8), mamba("all", block_size=16)],
    [full(), window(8), window(8), window(8)],
    [full(12), window(9, 4), window(9, 6), mamba(block_size=12)],
    [full(4), chunked(24, 8), chunked(12, 4), mamba(block_size=8)],
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


class History:
    """Random requests with common prefixes, as a scheduler would run them, and evictions."""

    def __init__(self, specs: list[KVCacheSpec], seed: int, eagle: set[int] | None) -> None:
        self.rng = Random(seed)
        self.specs = specs
        self.eagle = eagle
        self.hash_size = 2 if any(spec.block_size == 6 for spec in specs) else 4
        self.m = make_manager(
            *specs,
            num_blocks=self.rng.choice([60, 90, 150]),
            hash_block_size=self.hash_size,
            use_eagle=eagle is not None,
            eagle_groups=eagle or frozenset(),
        )
        self.trunks = [list(range(k, k + 72)) for k in (0, 1000)]
        self.live: list = []
        self.count = 0

    def prompt(self, extra: int = 9):
        trunk = self.rng.choice(self.trunks)
        own = range(5000 + 50 * self.count, 5000 + 50 * self.count + self.rng.randint(1, extra))
        self.count += 1
        tokens = [*trunk[: self.rng.choice([0, 5, 16, 24, 31, 48, 64, 72])], *own]
        return request(f"r{self.count}", tokens, hash_block_size=self.hash_size)

    def go_on(self) -> None:
        rng, m = self.rng, self.m
        what = rng.random()
        if what < 0.4:
            req = self.prompt()
            hit = m.get_computed_blocks(req)[1]
            if admit(m, req, min(rng.choice([4, 8, 13, 80]), req.num_tokens - hit)) is not None:
                self.live.append(req)
        elif what < 0.75 and self.live:
            req = rng.choice(self.live)
            if req.num_computed_tokens == req.num_tokens:
                req.extend([rng.randint(9000, 9999)])
            step(m, req, min(rng.choice([1, 4, 8, 12]), req.num_tokens - req.num_computed_tokens))
        elif what < 0.9 and self.live:
            m.free(self.live.pop(rng.randrange(len(self.live))))
        else:
            ids = rng.sample(range(m.block_pool.num_gpu_blocks), rng.randint(1, 4))
            m.evict_blocks(ids)
        m.new_step_starts()

    def check(self) -> None:
        """Every lookup against a search through all blocks of the pool for all lengths."""
        req = self.prompt(extra=12)
        keys = {b.block_hash for b in self.m.block_pool.blocks if b.block_hash is not None}
        cached = []
        for group, spec in enumerate(self.specs):
            scale = spec.block_size // self.hash_size
            own = {get_block_hash(key) for key in keys if get_group_id(key) == group}
            hashes = req.block_hashes[scale - 1 :: scale]
            cached.append({i for i, block_hash in enumerate(hashes) if block_hash in own})
        limit = req.num_tokens - 1
        eagle: Collection[int] = ()
        if self.eagle is not None:
            eagle = self.eagle or range(len(self.specs))
        hits, length = self.m.coordinator.find_longest_cache_hit(req.block_hashes, limit)
        assert length == oracle(self.specs, cached, limit, eagle)
        for group, (spec, hit) in enumerate(zip(self.specs, hits)):
            assert len(hit) * spec.block_size == length
            real = {i for i, block in enumerate(hit) if not block.is_null}
            assert set(needed_blocks(spec, length)) <= real <= cached[group]
        for group, spec in enumerate(self.specs):
            scale = spec.block_size // self.hash_size
            drops = group in eagle and not isinstance(spec, MambaSpec)
            (hit,) = spec_manager_map[type(spec)].find_longest_cache_hit(
                req.block_hashes[scale - 1 :: scale],
                limit,
                [group],
                self.m.block_pool,
                spec,
                drops,
                spec.block_size,
            )
            alone = oracle([spec], [cached[group]], limit, {0} if drops else ())
            assert len(hit) * spec.block_size == alone


@pytest.mark.parametrize("with_eagle", [False, True])
@pytest.mark.parametrize("specs", MIXES, ids=lambda specs: "-".join(map(label, specs)))
def test_random_histories(specs, with_eagle):
    eagle = None
    chunks = {g for g, s in enumerate(specs) if isinstance(s, ChunkedLocalAttentionSpec)}
    for seed in range(50 if NIGHTLY else 4):
        if with_eagle:
            fit = [g for g in range(len(specs)) if g not in chunks]
            eagle = set(Random(seed).sample(fit, k=min(len(fit), 1 + seed % 2)))
        history = History(specs, seed, eagle)
        for _ in range(60):
            history.go_on()
            history.check()


def test_full_spec_is_required():
    with pytest.raises(AssertionError):
        spec_manager_map[FullAttentionSpec].find_longest_cache_hit(
            [], 4, [0], BlockPool(4, True, 4), window(8), False, 4
        )
