"""What routers are told."""

from __future__ import annotations

import msgspec
import pytest

from jubako.kv_cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventAggregator,
    KVEventBatch,
)
from jubako.kv_cache.events import spec_kind

from .fakes import (
    ATTENTION,
    admit,
    chunked,
    cross,
    full,
    lora,
    make_manager,
    mamba,
    request,
    sink,
    step,
    window,
)


@pytest.fixture
def m():
    return make_manager(full(), num_blocks=4, enable_kv_cache_events=True)


def test_stores_and_removals(m):
    a = request("a", 10)
    admit(m, a)
    h = a.block_hashes
    (stored,) = m.take_events()
    assert stored == BlockStored(
        block_hashes=h[:2],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=None,
    )
    a.extend([10, 11])
    step(m, a, 2)
    (stored,) = m.take_events()
    assert stored.block_hashes == [a.block_hashes[2]]
    assert stored.parent_block_hash == h[1]
    assert stored.token_ids == [8, 9, 10, 11]
    assert m.take_events() == []

    m.free(a)
    b = request("b", range(50, 62))
    admit(m, b)
    *removed, stored = m.take_events()
    gone = [BlockRemoved([h], "GPU", 0) for h in reversed(a.block_hashes)]
    assert removed == gone
    assert stored.block_hashes == b.block_hashes
    m.free(b)
    m.reset_prefix_cache()
    assert m.take_events() == [AllBlocksCleared()]


def test_off():
    m = make_manager(full())
    admit(m, request("a", 10))
    assert m.take_events() == []


def test_adapter_and_salt(m):
    admit(m, request("a", 8, lora_request=lora("ad1"), cache_salt="s"))
    (stored,) = m.take_events()
    assert (stored.lora_name, stored.lora_id) == ("ad1", 1)
    assert stored.extra_keys == [("ad1", "s"), ("ad1",)]


def test_null_entries_split_runs():
    m = make_manager(window(8), num_blocks=40, enable_kv_cache_events=True)
    a = request("a", 36)
    m.allocate_slots(a, 4, num_external_computed_tokens=32, delay_cache_blocks=True)
    a.num_computed_tokens = 36
    m.cache_blocks(a, 36)
    (stored,) = m.take_events()
    assert len(stored.token_ids) == 4 * len(stored.block_hashes)
    assert stored.parent_block_hash == a.block_hashes[5]
    assert stored.token_ids == list(range(24, 36))
    assert stored.kv_cache_spec_sliding_window == 8


def test_second_copy_is_not_told():
    m = make_manager(full(), num_blocks=10, enable_kv_cache_events=True)
    a, b = request("a", 4), request("b", [*range(4), 90, 91, 92, 93])
    step(m, a, 4)
    step(m, b, 8)
    first, second = m.take_events()
    assert first.block_hashes == a.block_hashes
    # Only what is new; the parent is the hash that is known already.
    assert second.block_hashes == b.block_hashes[1:]
    assert second.parent_block_hash == a.block_hashes[0]
    m.evict_blocks({1})
    assert m.take_events() == []
    assert m.get_computed_blocks(request("c", 5))[1] == 4
    m.evict_blocks({2})
    assert m.take_events() == [BlockRemoved([a.block_hashes[0]], "GPU", 0)]


def test_integer_hashes():
    m = make_manager(full(), enable_kv_cache_events=True, use_int_block_hashes=True)
    a = request("a", 8)
    admit(m, a)
    (stored,) = m.take_events()
    assert stored.block_hashes == [int.from_bytes(h[-8:], "big") for h in a.block_hashes]


def test_group_index():
    m = make_manager(full(), window(8), enable_kv_cache_events=True)
    admit(m, request("a", 4))
    assert [(e.group_idx, e.kv_cache_spec_kind) for e in m.take_events()] == [
        (0, "full_attention"),
        (1, "sliding_window"),
    ]


def test_wire():
    stored = BlockStored([b"h"], None, [1, 2], 2, None, "GPU", None, [("x",)], 0, "mamba", None)
    batch = KVEventBatch(1.5, [stored, BlockRemoved([3], "GPU"), AllBlocksCleared()], 0, "e")
    wire = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(wire, type=KVEventBatch) == batch
    ts, events, rank, epoch = msgspec.msgpack.decode(wire)
    assert (ts, rank, epoch) == (1.5, 0, "e")
    assert [event[0] for event in events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]


def test_kinds():
    from jubako.kv_cache import EncoderOnlyAttentionSpec, KVCacheSpec, MLAAttentionSpec

    mla = MLAAttentionSpec(block_size=4, **ATTENTION)
    windowed = MLAAttentionSpec(block_size=4, sliding_window=8, **ATTENTION)
    kinds = {
        "full_attention": full(sliding_window=8),
        "mla_attention": mla,
        "sliding_window": window(8),
        "sliding_window_mla": windowed,
        "mamba": mamba(),
        "chunked_local_attention": chunked(8),
        "sink_full_attention": sink(8),
        "encoder_only_attention": EncoderOnlyAttentionSpec(block_size=4, **ATTENTION),
        "cross_attention": cross(),
        "unknown": KVCacheSpec(block_size=4),
    }
    assert {kind: spec_kind(spec) for kind, spec in kinds.items()} == {k: k for k in kinds}


def test_aggregator():
    with pytest.raises(ValueError, match="num_workers is 0"):
        KVEventAggregator(0)
    aggregator = KVEventAggregator(2)
    a, b = BlockRemoved([b"a"], "CPU"), BlockRemoved([b"b"], "CPU")
    aggregator.add_events([a, b])
    aggregator.add_events([BlockRemoved([b"a"], "CPU")])
    assert aggregator.get_common_events() == [a]
    assert aggregator.get_all_events() == [a, b]
    aggregator.increment_workers(1)
    assert aggregator.get_common_events() == []
    assert aggregator.get_number_of_workers() == 3
    with pytest.raises(ValueError, match="count is 0"):
        aggregator.increment_workers(0)
    aggregator.reset_workers()
    assert aggregator.get_number_of_workers() == 1
    assert aggregator.get_common_events() == [a, b]
    aggregator.clear_events()
    assert aggregator.get_all_events() == []
