"""Configurations that cannot work, and calls that no correct caller makes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.errors import ConfigError
from jubako.kv_cache import (
    BlockPool,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheManager,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_request_block_hasher,
)

from .fakes import (
    ATTENTION,
    HASH,
    NIGHTLY,
    FakeRequest,
    admit,
    chunked,
    config_of,
    cross,
    engine_config,
    full,
    make_manager,
    mamba,
    request,
    sink,
    step,
    window,
)
from .invariants import check_pool, check_tables, owners_of, snapshot


class OtherSpec(FullAttentionSpec):
    pass


UNIFORM = UniformTypeKVCacheSpecs(
    block_size=4, kv_cache_specs={"a": full(), "b": full(num_kv_heads=2)}
)

IMPOSSIBLE = {
    "no blocks": ([full()], {"num_blocks": 0}, "num_gpu_blocks is 0"),
    "fewer than no blocks": ([full()], {"num_blocks": -3}, "num_gpu_blocks is -3"),
    "half a block": ([full()], {"num_blocks": 2.5}, r"num_gpu_blocks is 2\.5"),
    "blocks of no tokens": ([full(0)], {}, "block_size is 0"),
    "blocks of fewer": ([full(-4)], {}, "block_size is -4"),
    "blocks of half a token": ([full(1.5)], {}, r"block_size is 1\.5"),
    "hashes of no tokens": ([full()], {"hash_block_size": 0}, "hash_block_size is 0"),
    "no context": ([full()], {"max_model_len": 0}, "max_model_len is 0"),
    "step of fewer than no tokens": (
        [full()],
        {"max_num_batched_tokens": -1},
        "max_num_batched_tokens is -1",
    ),
    "no ranks": ([full()], {"dcp_world_size": 0}, "decode_context_parallel_size is 0"),
    "window of nothing": ([window(0)], {}, "sliding_window is 0"),
    "chunk of nothing": ([chunked(0)], {}, "attention_chunk_size is 0"),
    "chunk across blocks": ([chunked(6)], {}, "6 is not a multiple of the KV block size 4"),
    "no sinks": ([sink(0)], {}, "sink_len is 0"),
    "part of a sink block": ([sink(6)], {}, "sink_len is 6; it must be a multiple"),
    "more sinks than blocks": ([sink(8)], {"num_blocks": 2}, "only 1 are free"),
    "unknown mode": ([mamba("some")], {}, "mamba_cache_mode is 'some'"),
    "fewer than no drafts": ([mamba(sp=-1)], {}, "num_speculative_blocks is -1"),
    "other hash size": ([full()], {"hash_block_size": 8}, "8 must be the block size 4"),
    "hash size of one rank": ([full()], {"dcp_world_size": 2}, "4 must be the block size 8"),
    "sizes that do not divide": (
        [full(), window(8, 6)],
        {"hash_block_size": 4},
        "6 is not a multiple of hash_block_size 4",
    ),
    "ranks and a window": ([window(8)], {"dcp_world_size": 2}, "do not support context"),
    "ranks and chunks": ([chunked(8)], {"pcp_world_size": 2}, "do not support context"),
    "ranks and states": ([mamba()], {"dcp_world_size": 2}, "do not support context"),
    "ranks and two kinds": (
        [full(), full(8)],
        {"dcp_world_size": 2},
        "hybrid model does not support context",
    ),
    "two groups alike": ([full(), full()], {}, "needs two different"),
    "cross attention with caching": ([full(), cross()], {}, "cross attention"),
    "EAGLE and chunks": ([full(), chunked(8)], {"use_eagle": True}, "EAGLE"),
    "negative watermark": ([full()], {"watermark": -0.1}, r"watermark is -0\.1"),
    "watermark of all": ([full()], {"watermark": 1.0}, r"watermark is 1\.0"),
    "watermark that is no number": ([full()], {"watermark": float("nan")}, "watermark is nan"),
    "watermark in words": ([full()], {"watermark": "low"}, "watermark is 'low'"),
    "step of no tokens": (
        [full()],
        {"max_num_batched_tokens": 0},
        "max_num_batched_tokens is 0",
    ),
    "truth for a number": ([full()], {"max_model_len": True}, "max_model_len is True"),
    "a size of a scheduler alone": (
        [full(), window(8, 8)],
        {"scheduler_block_size": 12},
        "scheduler_block_size is 12; it must be a multiple of 8",
    ),
    "no size of a scheduler": ([full()], {"scheduler_block_size": 0}, "scheduler_block_size is 0"),
    "no heads": ([full(num_kv_heads=0)], {}, "num_kv_heads is 0"),
    "heads of nothing": ([window(8, head_size=-8)], {}, "head_size is -8"),
    "values of nothing": ([full(head_size_v=0)], {}, "head_size_v is 0"),
    "a dtype that nobody knows": ([full(dtype="half")], {}, "dtype 'half' is unknown"),
    "padding below the page": ([full(page_size_padded=8)], {}, "page_size_padded 8 is below"),
    "sinks in words": ([sink("8")], {}, "sink_len is '8'"),
    "drafts of no number": ([mamba(sp=None)], {}, "num_speculative_blocks is None"),
    "states of nothing": (
        [MambaSpec(block_size=4, shapes=((0,),), dtypes=("float32",), mamba_cache_mode="all")],
        {},
        "takes no memory",
    ),
    "a type without a manager": (
        [OtherSpec(block_size=4, **ATTENTION)],
        {},
        "no manager for KV cache specs of type OtherSpec",
    ),
    "the worker's groups": ([UNIFORM], {}, "UniformTypeKVCacheSpecs"),
}


@pytest.mark.parametrize(("specs", "options", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_cache(specs, options, message):
    with pytest.raises(ConfigError, match=message):
        make_manager(*specs, **options)


@pytest.mark.parametrize("block_size", [0, -4, None, "4", True])
def test_a_hasher_of_impossible_blocks(block_size):
    with pytest.raises(ConfigError, match="block_size is"):
        get_request_block_hasher(block_size, HASH)


def test_errors_are_also_what_others_raise():
    with pytest.raises(AssertionError):
        make_manager(full(), num_blocks=0)
    with pytest.raises(KeyError) as caught:
        make_manager(UNIFORM)
    assert str(caught.value).startswith("no manager")
    with pytest.raises(NotImplementedError):
        get_kv_cache_groups(
            engine_config(), {"f": full(num_kv_heads=4), "w": window(8, num_kv_heads=3)}
        )


@pytest.mark.parametrize(
    ("layers", "values", "message"),
    [
        ({"f": full(0)}, {}, "block_size is 0"),
        ({"f": full(), "w": window(-1)}, {}, "sliding_window is -1"),
        ({"f": full(), "s": sink(6)}, {}, "sink_len is 6"),
        ({"f": full(dtype="bf17")}, {}, "'bf17' is unknown"),
        ({"f": full(page_size_padded=10)}, {}, "page_size_padded 10 is below"),
        ({"f": full(num_kv_heads=4), "w": window(8, num_kv_heads=3)}, {}, "do not divide"),
        ({"w": window(8)}, {"decode_context_parallel_size": 2}, "must be 1"),
        ({"f": full()}, {"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0"),
        ({"f": full()}, {"num_gpu_blocks_override": 3}, "num_gpu_blocks_override=3"),
    ],
)
def test_impossible_start(layers, values, message):
    with pytest.raises(ConfigError, match=message):
        get_kv_cache_configs(engine_config(**values), [layers], [10**9])


SIZES = st.sampled_from([-1, 0, 1, 2, 3, 4, 6, 8])
SPECS = st.one_of(
    SIZES.map(full),
    st.builds(window, SIZES, SIZES),
    st.builds(chunked, SIZES, SIZES),
    st.builds(mamba, st.sampled_from(["none", "all", "align", "x"]), SIZES, SIZES),
    st.builds(sink, SIZES, SIZES),
    SIZES.map(cross),
)


@settings(max_examples=20_000 if NIGHTLY else 500, deadline=None)
@given(
    st.lists(SPECS, max_size=4),
    st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([-1, 0, 1, 2, 9, 40]),
            "hash_block_size": SIZES,
            "max_model_len": st.sampled_from([0, 1, 64]),
            "enable_caching": st.booleans(),
            "use_eagle": st.booleans(),
            "dcp_world_size": st.sampled_from([0, 1, 1, 1, 2]),
            "pcp_world_size": st.sampled_from([1, 1, 2]),
            "watermark": st.sampled_from([-1, 0, 0.3, 1]),
        }
    ),
)
def test_constructor_works_or_says_why_not(specs, options):
    try:
        m = make_manager(*specs, **options)
    except ConfigError:
        return
    # What can be built can be used.
    req = request("a", 9, hash_block_size=options["hash_block_size"])
    if admit(m, req, num_encoder_tokens=5) is not None:
        step(m, req, 1)
    m.free(req)
    assert m.usage == 0
    assert m.reset_prefix_cache()


# Calls


def test_blocks_of_another_pool():
    m, other = make_manager(full(), num_blocks=10), make_manager(full(), num_blocks=20)
    a, b = request("a", 9), request("b", 9)
    admit(m, a)
    admit(other, b)
    before = snapshot(m), snapshot(other)
    foreign = [
        other.block_pool.blocks[1],
        other.block_pool.blocks[7],
        other.block_pool.blocks[15],
        KVCacheBlock(-1),
        KVCacheBlock(3, ref_cnt=1),
    ]
    for block in foreign:
        with pytest.raises(AssertionError, match="another pool"):
            m.block_pool.free_blocks([m.block_pool.blocks[1], block])
        with pytest.raises(AssertionError, match="another pool"):
            m.block_pool.touch([m.block_pool.blocks[1], block])
        with pytest.raises(AssertionError, match="another pool"):
            m.allocate_slots(request("c", 9), 5, 4, KVCacheBlocks(([block],)))
        m.free(request("c", 9))
    assert (snapshot(m), snapshot(other)) == before


def test_requests_that_nobody_knows():
    m = make_manager(full(), window(8), num_blocks=20)
    admit(m, request("a", 9))
    before = snapshot(m)
    stranger = request("x", 9)
    m.free(stranger)
    assert m.pop_blocks_for_free(stranger) == []
    m.remove_skipped_blocks("x", 100)
    m.evict_uncomputed_blocks("x", 0)
    assert m.get_block_ids("x") == ([], [])
    assert m.get_block_ids_for_computed_tokens("x", 50) == ([], [])
    assert m.next_event_tokens("x") == 0
    assert m.get_num_common_prefix_blocks("x") == [0, 0]
    assert snapshot(m) == before


def test_freed_twice():
    m = make_manager(full(), window(8), num_blocks=20)
    a = request("a", 9)
    admit(m, a)
    m.free(a)
    before = snapshot(m)
    m.free(a)
    assert snapshot(m) == before
    b = request("b", 9)
    admit(m, b)
    blocks = m.pop_blocks_for_free(b)
    m.free(b)
    m.block_pool.free_blocks(reversed(blocks))
    before = snapshot(m)
    with pytest.raises(AssertionError, match="released twice"):
        m.block_pool.free_blocks(reversed(blocks))
    assert snapshot(m) == before


def test_caching_more_than_there_is():
    m = make_manager(full(), num_blocks=20)
    a = request("a", 9)
    step(m, a, 9)
    before = snapshot(m)
    with pytest.raises(AssertionError, match="x has 0 KV blocks"):
        m.cache_blocks(request("x", 9), 8)
    with pytest.raises(AssertionError, match="a has 3 KV blocks, 10 are to be registered"):
        m.cache_blocks(a, 40)
    assert snapshot(m) == before


def call_at_random(m: KVCacheManager, req: FakeRequest, rng: Random) -> None:
    """Right or wrong, as it comes."""
    pool, request_id = m.block_pool, req.request_id
    managers = m.coordinator.single_type_managers
    left = req.num_tokens - req.num_computed_tokens
    what = rng.randrange(24)
    if what == 0:
        m.free(req)
    elif what == 1:
        m.evict_blocks([rng.randint(-2, 30) for _ in range(2)])
    elif what == 2:
        m.remove_skipped_blocks(request_id, rng.randint(-5, req.num_computed_tokens))
    elif what == 3:
        pool.get_new_blocks(30)
    elif what == 4:
        pool.touch([pool.blocks[1], KVCacheBlock(1)])
    elif what == 5:
        pool.free_blocks([*[b for b in pool.blocks if b.ref_cnt == 1][:1], KVCacheBlock(1)])
    elif what == 6:
        pool.free_blocks([b for b in pool.blocks if not b.ref_cnt][:2])
    elif what == 7:
        m.allocate_slots(req, 0)
    elif what == 8:
        m.reset_prefix_cache()
    elif what == 9:
        m.pop_blocks_for_free(request("x", 5))
    elif what == 10:
        m.cache_blocks(req, 80)
    elif what == 11:
        m.new_step_starts()
    elif request_id not in managers[0].req_to_blocks:
        req.num_computed_tokens = 0
        admit(m, req, rng.randint(1, 12))
    elif what == 12:
        m.allocate_slots(req, 1, 8, KVCacheBlocks(tuple(pool.blocks[1:3] for _ in managers)))
    elif what == 13:
        m.allocate_slots(req, 1, num_external_computed_tokens=4)
    elif left:
        step(m, req, min(left, rng.randint(1, 12)))


@pytest.mark.parametrize("specs", [[full()], [full(), window(8), chunked(8)], [full(), mamba()]])
def test_wrong_calls_corrupt_nothing(specs):
    """A careless caller gets exceptions, and the account stays right."""
    for seed in range(300 if NIGHTLY else 12):
        rng = Random(seed)
        m = make_manager(*specs, num_blocks=24, max_model_len=64)
        requests = {f"r{i}": request(f"r{i}", rng.randint(1, 40)) for i in range(4)}
        refused = 0
        for _ in range(120):
            req = rng.choice(list(requests.values()))
            try:
                call_at_random(m, req, rng)
            except (AssertionError, ValueError):
                refused += 1
            req.num_registered_tokens = req.num_tokens
            check_pool(m.block_pool, owners_of(m, []))
            check_tables(m, requests, evicted=True)
        assert refused
        for req in requests.values():
            m.free(req)
        assert m.usage == 0
        assert m.block_pool.reset_prefix_cache()


def test_pool_of_one_block_serves_nobody():
    m = make_manager(full(), num_blocks=1)
    assert admit(m, request("a", 5)) is None
    assert m.usage == 0


def test_size_is_an_integer():
    with pytest.raises(ConfigError, match="num_gpu_blocks is '9'"):
        BlockPool("9", True, 4)
    with pytest.raises(ConfigError, match="must be an integer above 0"):
        KVCacheManager(config_of([full()], None), 64, 4)


def test_without_a_prefix_cache_a_scheduler_may_count_in_other_blocks():
    manager = make_manager(full(8), mamba("none"), enable_caching=False, scheduler_block_size=6)
    assert manager.scheduler_block_size == 6
