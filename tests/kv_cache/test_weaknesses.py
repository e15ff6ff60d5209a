"""Faults that engines of this kind have had, each as a case that must go right here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jubako.errors import ConfigError
from jubako.kv_cache import (
    BlockPool,
    FullAttentionSpec,
    KVCacheBlocks,
    UniformTypeKVCacheSpecs,
    get_hash_fn_by_name,
    get_kv_cache_configs,
    get_kv_cache_groups,
    hash_block_tokens,
)
from jubako.kv_cache.specs import cdiv

from .fakes import (
    admit,
    chunked,
    cross,
    engine_config,
    feature,
    full,
    hashed,
    lora,
    make_manager,
    mamba,
    queue,
    request,
    sink,
    step,
    table,
    window,
)
from .lookup import fill
from .test_lookup import hybrid


def real(ids):
    return [i for i in ids if i]


# Wrong or foreign content


def test_hits_are_owned_before_any_group_takes_blocks():
    """External blocks of one group must not evict the hits of another."""
    m = make_manager(full(), window(64), num_blocks=11)
    a, other = request("a", 8), request("x", range(100, 112))
    admit(m, a)
    m.free(a)
    admit(m, other)
    m.free(other)
    # What is handed out next are the hits themselves.
    assert queue(m)[:4] == [4, 2, 3, 1]
    b = request("b", 17)
    hits, hit = m.get_computed_blocks(b)
    assert hit == 8
    assert step(
        m, b, 1, num_new_computed_tokens=8, new_computed_blocks=hits, num_external_computed_tokens=8
    )
    first, second = m.get_block_ids("b")
    assert len(first) == len(second) == 5
    assert set(first).isdisjoint(second)
    assert (first[:2], second[:2]) == hits.get_block_ids()


@pytest.mark.parametrize("mode", ["align", "all"])
def test_state_of_this_step_waits_for_the_next(mode):
    m = make_manager(full(), mamba(mode), num_blocks=50)
    a, b = request("a", 24), request("b", [*range(24), 90])
    admit(m, a)
    before = queue(m), hashed(m)
    assert admit(m, b) is None
    assert (queue(m), hashed(m)) == before
    m.new_step_starts()
    assert admit(m, b) == 24


def test_state_is_found_only_under_the_hash_of_its_tokens():
    m = make_manager(mamba(), num_blocks=20)
    a = request("a", 26)
    step(m, a, 10)
    step(m, a, 16)
    m.new_step_starts()
    # Block 2 holds the state after 10 tokens, not after 12; block 6 that after 26.
    assert m.get_computed_blocks(request("b", 27))[1] == 0
    assert hashed(m) == []


def test_state_of_a_step_with_drafts_is_not_found():
    m = make_manager(mamba(sp=2), num_blocks=20)
    a = request("a", 9)
    step(m, a, 9)
    a.extend([50])
    # One known token and two drafts end at 12, a border.
    m.allocate_slots(a, 3)
    a.num_computed_tokens = 12
    a.extend([51, 52, 53])
    m.cache_blocks(a, 12)
    assert hashed(m) == []
    # Without drafts it is.
    b = request("b", range(100, 108))
    step(m, b, 8)
    assert len(hashed(m)) == 1


def test_a_later_image_does_not_hide_an_earlier_one():
    def prompt(image):
        req = request("a", 7, mm_features=[feature(image, 4, 2), feature("Z", 6, 1)])
        req.extend([7])
        return req.block_hashes

    x, y = prompt("X"), prompt("Y")
    assert x[0] == y[0]
    assert x[1] != y[1]


def test_a_block_at_an_items_end_has_one_hash():
    features = [feature("A", 2, 2)]
    grown = request("a", 4, mm_features=features)
    grown.extend([4, 5, 6, 7])
    assert grown.block_hashes == request("a", 8, mm_features=features).block_hashes
    assert grown.block_hashes != request("a", 8, mm_features=[feature("A", 2, 3)]).block_hashes


def test_the_place_of_an_item_counts():
    tokens = [5] * 8
    one = request("a", tokens, mm_features=[feature("A", 0, 2)])
    other = request("a", tokens, mm_features=[feature("A", 1, 2)])
    assert one.block_hashes[0] != other.block_hashes[0]


@pytest.mark.parametrize("name", ["sha256", "xxhash"])
def test_pickle_hashes_depend_on_content_only(name):
    pytest.importorskip("xxhash")
    function = get_hash_fn_by_name(name)
    one = "image" + str(len(name))
    two = "image" + str(len(name))
    assert one is not two
    same = hash_block_tokens(function, b"p", [1, 2], (one, one))
    assert hash_block_tokens(function, b"p", [1, 2], (one, two)) == same
    assert hash_block_tokens(function, b"p", np.array([1, 2]), (two, one)) == same


def test_salt_does_not_pass_for_an_adapter():
    salted = request("a", 4, cache_salt="sql")
    assert salted.block_hashes != request("b", 4, lora_request=lora("sql")).block_hashes


def test_reloaded_adapter_finds_nothing():
    old = request("a", 4, lora_request=lora("x"))
    assert old.block_hashes != request("b", 4, lora_request=lora("x", 1)).block_hashes


def test_all_full_groups_are_cut():
    specs = [full(4), full(8), window(8)]
    # The window lacks what follows 24 tokens.
    _, _, hits, length = hybrid(specs, [set(range(9)), set(range(4)), set(range(6))], 40)
    assert length == 24
    assert [len(hit) for hit in hits] == [6, 3, 6]


def test_failed_step_leaves_nothing_findable():
    m = make_manager(full(), window(8), num_blocks=40)
    done = request("done", range(50, 59))
    admit(m, done)
    m.new_step_starts()
    m.take_registered_block_ids()
    a = request("a", 12)
    admit(m, a)
    m.evict_blocks(m.take_registered_block_ids())
    assert m.get_computed_blocks(request("b", 13))[1] == 0
    assert m.get_computed_blocks(request("c", range(50, 60)))[1] == 8


def test_planned_step_that_does_not_run():
    m = make_manager(full(), num_blocks=40)
    a = request("a", 12)
    step(m, a, 6)
    step(m, a, 6)
    m.evict_uncomputed_blocks("a", 6)
    m.free(a)
    assert m.get_computed_blocks(request("b", 13))[1] == 4


# Too much or too little memory


@pytest.mark.parametrize(
    "layers", [{"c": chunked(6)}, {"f": full(num_kv_heads=2), "c": chunked(4)}]
)
def test_chunks_that_share_blocks_are_refused(layers):
    with pytest.raises(ConfigError, match="attention_chunk_size"):
        get_kv_cache_groups(engine_config(), layers)


def test_value_size_is_part_of_a_full_spec():
    with pytest.raises(AssertionError):
        FullAttentionSpec.merge([full(head_size_v=4), full(head_size_v=8)])


def test_local_hit_is_common_to_all_groups():
    m = make_manager(full(), mamba(), num_blocks=40)
    req = request("a", 21)
    fill(m.block_pool, req, 0, 4, {0, 1, 2, 3})
    assert m.get_computed_blocks(req)[1] == 0
    assert m.get_shared_prefix_tokens(req) == 16


def test_external_tokens_in_a_hybrid_model():
    """Each group gets blocks exactly where it will read."""
    m = make_manager(full(), window(8), mamba(), num_blocks=40)
    a = request("a", 21)
    m.allocate_slots(a, 0, num_external_computed_tokens=20, delay_cache_blocks=True)
    ids = m.get_block_ids("a")
    assert [[i > 0 for i in row] for row in ids] == [
        [True] * 5,
        [False] * 3 + [True] * 2,
        [False] * 4 + [True],
    ]
    assert m.get_blocks("a").get_unhashed_block_ids_all_groups() == [real(row) for row in ids]
    m.cache_blocks(a, 20)
    m.new_step_starts()
    assert m.get_computed_blocks(request("b", 22))[1] == 20
    a.num_computed_tokens = 20
    # The loaded state stays as it is; the request goes on in a block of its own.
    assert [len(row) for row in step(m, a, 1)] == [1, 1, 1]
    assert m.get_block_ids("a")[2][4] == ids[2][4]


def test_unaligned_external_state_goes_on_in_place():
    m = make_manager(full(), mamba(), num_blocks=40)
    a = request("a", 19)
    m.allocate_slots(a, 0, num_external_computed_tokens=18, delay_cache_blocks=True)
    a.num_computed_tokens = 18
    assert step(m, a, 1) == [[], []]
    for n in range(4):
        a.extend([60 + n])
        step(m, a, 1)
    assert len(real(m.get_block_ids("a")[1])) <= 2


def test_double_free_fails_early():
    pool = BlockPool(10, True, 4)
    blocks = pool.get_new_blocks(3)
    with pytest.raises(AssertionError):
        pool.free_blocks([*blocks, blocks[0]])
    assert pool.get_num_free_blocks() == 6
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError):
        pool.free_blocks(blocks[:1])
    assert pool.get_num_free_blocks() == len(set(pool.free_block_queue.get_all_free_blocks())) == 9


def test_need_is_never_negative():
    m = make_manager(full(), mamba(sp=2), num_blocks=40)
    a = request("a", 6)
    step(m, a, 6)
    a.extend([50])
    # Drafts up to the next block, all rejected; then a shorter step.
    m.allocate_slots(a, 3)
    manager = m.coordinator.single_type_managers[1]
    assert manager.get_num_blocks_to_allocate("a", 5, (), 4, 4) == 0
    assert list(manager.allocate_new_blocks("a", 5, 4)) == []


def test_sinks_are_no_capacity():
    m = make_manager(sink(8), num_blocks=10)
    assert m.usage == 0
    assert m.reset_prefix_cache()
    a = request("a", 28)
    admit(m, a)
    assert m.usage == 1


HEADS = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")


@pytest.mark.parametrize("blocks", [4, 5])
def test_a_start_that_passes_can_run_its_longest_request(blocks):
    layers, memory = {"f": HEADS}, blocks * HEADS.page_size_bytes
    config = engine_config(max_model_len=64)
    if blocks == 4:
        with pytest.raises(ConfigError):
            get_kv_cache_configs(config, [layers], [memory])
        return
    (kv_config,) = get_kv_cache_configs(config, [layers], [memory])
    m = make_manager(HEADS, num_blocks=kv_config.num_blocks, hash_block_size=16, max_model_len=64)
    assert admit(m, request("a", 64, hash_block_size=16)) == 0


@pytest.mark.parametrize("specs", [[full(), window(8), window(16)], [full(), window(8)]])
def test_eagle_loses_one_block_only(specs):
    m = make_manager(*specs, num_blocks=80, use_eagle=True)
    a = request("a", 64)
    admit(m, a)
    m.free(a)
    assert m.get_computed_blocks(request("b", 65))[1] == 60


def test_eagle_with_two_block_sizes():
    m = make_manager(full(), window(8, 8), num_blocks=80, use_eagle=True)
    admit(m, request("a", 64))
    assert m.get_computed_blocks(request("b", 65))[1] == 56


def test_eagle_needs_the_block_after_the_hit_in_every_group():
    specs = [full(), window(8), window(16)]
    everything = set(range(18))
    _, _, _, length = hybrid(specs, [everything, everything - {9}, everything - {14}], 68, set())
    # 36 would need block 9 of the first window, 56 block 14 of the second.
    assert length == 52


def test_evictions_take_all_groups_alike():
    def left(interleaved):
        m = make_manager(full(), window(64), num_blocks=18, interleaved_free=interleaved)
        a = request("a", 32)
        admit(m, a)
        m.free(a)
        # Of 16 cached blocks 7 are lost (one block has always been free).
        step(m, request("b", range(100, 116)), 16)
        return m.get_computed_blocks(request("c", 33))[1]

    assert left(interleaved=True) == 16
    assert left(interleaved=False) == 4


def test_admission_cap_counts_real_blocks():
    m = make_manager(window(8), num_blocks=30, max_num_batched_tokens=17)
    a = request("a", 40)
    for _ in range(4):
        step(m, a, 10)
    m.free(a)
    b = request("b", 100)
    hits, hit = m.get_computed_blocks(b)
    assert hit == 40
    manager = m.coordinator.single_type_managers[0]
    assert manager.max_admission_blocks_per_request == 7
    gate = manager.get_num_blocks_to_allocate("b", 100, hits.blocks[0], 40, 100, True)
    chunk = manager.get_num_blocks_to_allocate("b", 56, hits.blocks[0], 40, 56)
    assert (gate, chunk) == (7, 6)
    admit(m, b, 16)
    assert len(real(table(m, b))) == 6
    assert manager.get_num_blocks_to_allocate("b", 100, (), 56, 100, True) >= 4


@pytest.mark.parametrize(("sp", "stride"), [(2, 4), (2, 5), (6, 7), (6, 9)])
def test_superseded_states_do_not_pile_up(sp, stride):
    m = make_manager(mamba(sp=sp), num_blocks=60)
    a = request("a", 160)
    for n in [2, *[stride] * (158 // stride)]:
        step(m, a, n)
        assert len(real(table(m, a))) <= 3 + sp
    m.free(a)
    assert m.usage == 0


def test_states_before_drafts_are_kept():
    """Until it is known which drafts were right, the state before them may be wanted again."""
    m = make_manager(mamba(sp=2), num_blocks=60)
    a = request("a", 3)
    step(m, a, 3)
    a.extend([50])
    m.allocate_slots(a, 3)
    m.remove_skipped_blocks("a", 6)
    assert table(m, a)[0] == 1
    m.remove_skipped_blocks("a", 7)
    assert table(m, a)[0] == 0


# Reports and habits


def test_events_carry_whole_runs():
    m = make_manager(window(5), num_blocks=20, enable_kv_cache_events=True)
    a = request("a", 12)
    m.allocate_slots(a, 4, num_external_computed_tokens=8, delay_cache_blocks=True)
    a.num_computed_tokens = 12
    m.cache_blocks(a, 12)
    (stored,) = m.take_events()
    assert len(stored.token_ids) == len(stored.block_hashes) * stored.block_size
    assert stored.parent_block_hash == a.block_hashes[0]
    assert stored.group_idx == 0
    assert all(len(block_hash) == 32 for block_hash in stored.block_hashes)


def test_refused_requests_are_not_counted():
    m = make_manager(full(), num_blocks=5, log_stats=True)
    a = request("a", 40)
    assert [admit(m, a) for _ in range(5)] == [None] * 5
    assert m.make_prefix_cache_stats().requests == 0


def test_refused_requests_leave_no_trace():
    m = make_manager(full(), window(8), num_blocks=5)
    assert admit(m, request("a", 40)) is None
    for manager in m.coordinator.single_type_managers:
        assert manager.req_to_blocks == {}
        assert manager.num_cached_block == {}


def test_an_empty_result_of_ones_own():
    m = make_manager(full(), num_blocks=20)
    a = request("a", 2)
    step(m, a, 2)
    for _ in range(12):
        a.extend([1])
        assert m.allocate_slots(a, 1, 0, KVCacheBlocks(([],))) is not None
        a.num_computed_tokens += 1


def test_models_without_a_prefix_cache():
    with pytest.raises(ConfigError):
        make_manager(full(), cross())
    assert admit(make_manager(num_blocks=1), request("a", 5)) == 0


def test_evicted_blocks_in_use_are_registered_again():
    m = make_manager(full(), num_blocks=20)
    a = request("a", 16)
    admit(m, a)
    m.evict_blocks({2})
    assert m.get_computed_blocks(request("b", 17))[1] == 4
    a.extend([70])
    step(m, a, 1)
    assert m.get_computed_blocks(request("b", 17))[1] == 16


def test_two_windows_without_the_hybrid_manager():
    layers = {"a": full(sliding_window=8), "b": full(sliding_window=16)}
    config = engine_config(disable_hybrid_kv_cache_manager=True)
    (group,) = get_kv_cache_groups(config, layers)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    m = make_manager(next(iter(group.kv_cache_spec.kv_cache_specs.values())))
    assert admit(m, request("a", 9)) == 0


def test_unhashed_blocks_first():
    m = make_manager(full(), num_blocks=10, free_unhashed_first=True)
    a = request("a", 10)
    admit(m, a)
    m.free(a)
    assert queue(m)[0] == 3


def test_startup_need_is_the_sum_over_groups():
    layers = {f"f{i}": HEADS for i in range(2)}
    spec = window(1024, 16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    layers |= {f"s{i}": spec for i in range(4)}
    need = 512 + 193 + 193
    memory = need * 2 * HEADS.page_size_bytes
    with pytest.raises(ConfigError):
        get_kv_cache_configs(engine_config(), [layers], [memory])
    memory += 2 * HEADS.page_size_bytes
    assert get_kv_cache_configs(engine_config(), [layers], [memory])[0].num_blocks == need + 1


def test_pipeline_stage_pays_for_its_own_layers():
    stages = [{"a": HEADS}, {"b": replace(HEADS, num_kv_heads=4)}]
    pages = cdiv(8192, 16) + 1
    configs = get_kv_cache_configs(engine_config(), stages, [pages * 65536, pages * 65536 // 2])
    assert [c.num_blocks for c in configs] == [pages, pages]
