"""From a model's layers to groups."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from jubako.errors import ConfigError
from jubako.kv_cache import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_groups,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)

from .fakes import ATTENTION, chunked, engine_config, full, mamba, window

HYBRID = engine_config()
NOT_HYBRID = engine_config(disable_hybrid_kv_cache_manager=True)


def layers(**counts_and_specs):
    return {f"{name}{i}": spec for name, (n, spec) in counts_and_specs.items() for i in range(n)}


def names(groups):
    return [group.layer_names for group in groups]


def test_two_and_four():
    groups = get_kv_cache_groups(HYBRID, layers(f=(2, full()), s=(4, window(8))))
    assert names(groups) == [["f0", "f1"], ["s0", "s2"], ["s1", "s3"]]
    assert [group.kv_cache_spec for group in groups] == [full(), window(8), window(8)]


def test_padding_layer(caplog):
    with caplog.at_level(logging.WARNING):
        groups = get_kv_cache_groups(HYBRID, layers(f=(3, full()), s=(5, window(8))))
    assert names(groups) == [["f0", "f1", "f2"], ["s0", "s2", "s4"], ["s1", "s3"]]
    assert "1 padding layers waste up to 20.0%" in caplog.text


@pytest.mark.parametrize(
    ("n_full", "n_window", "sizes"),
    [
        (12, 13, [12, 13]),
        (8, 9, [8, 9]),
        (8, 10, [8, 5, 5]),
        # 20, 15 and 15 would waste a quarter of the windows' tensors.
        (20, 30, [10, 10, 10, 10, 10]),
        (12, 18, [6, 6, 6, 6, 6]),
        (9, 12, [9, 6, 6]),
        (4, 3, [2, 2, 3]),
    ],
)
def test_group_sizes(n_full, n_window, sizes):
    groups = get_kv_cache_groups(HYBRID, layers(f=(n_full, full()), s=(n_window, window(8))))
    assert [len(group.layer_names) for group in groups] == sizes


def test_no_layers():
    assert get_kv_cache_groups(HYBRID, {}) == []
    encoder = EncoderOnlyAttentionSpec(block_size=4, **ATTENTION)
    assert get_kv_cache_groups(HYBRID, {"e": encoder}) == []
    assert names(get_kv_cache_groups(HYBRID, {"e": encoder, "f": full()})) == [["f"]]


def test_uniform():
    groups = get_kv_cache_groups(HYBRID, layers(f=(3, full())))
    assert names(groups) == [["f0", "f1", "f2"]]
    assert groups[0].kv_cache_spec == full()


def test_uniform_type():
    groups = get_kv_cache_groups(HYBRID, {"a": full(num_kv_heads=8), "b": full(num_kv_heads=4)})
    assert names(groups) == [["a", "b"]]
    assert isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)


def test_value_heads_of_other_sizes_are_not_merged():
    groups = get_kv_cache_groups(HYBRID, {"a": full(head_size_v=4), "b": full()})
    assert groups[0].kv_cache_spec.page_size_bytes == (8 + 4 + 8 + 8) * 4 * 4


def test_fallback():
    specs = layers(f=(2, full()), s=(4, window(8)))
    groups = get_kv_cache_groups(NOT_HYBRID, specs)
    assert [len(group.layer_names) for group in groups] == [6]
    assert groups[0].kv_cache_spec == full(sliding_window=8)
    assert specs["s0"] == full(sliding_window=8)

    groups = get_kv_cache_groups(
        NOT_HYBRID, layers(f=(2, full()), s=(4, window(8, num_kv_heads=4)))
    )
    assert len(groups) == 1
    assert isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)

    groups = get_kv_cache_groups(NOT_HYBRID, layers(f=(2, full()), c=(4, chunked(8))))
    assert groups[0].kv_cache_spec == full(attention_chunk_size=8)

    with pytest.raises(ConfigError, match="ChunkedLocalAttentionSpec, SlidingWindowSpec"):
        get_kv_cache_groups(NOT_HYBRID, layers(s=(2, window(8)), c=(4, chunked(8))))


def test_fallback_leaves_uniform_models_alone():
    specs = layers(s=(2, window(8)))
    unify_hybrid_kv_cache_specs(specs)
    assert specs == layers(s=(2, window(8)))
    empty = {}
    unify_hybrid_kv_cache_specs(empty)
    assert get_kv_cache_groups(NOT_HYBRID, empty) == []


def test_fallback_with_two_windows():
    groups = get_kv_cache_groups(NOT_HYBRID, {"f": full(), "s": window(8), "t": window(16)})
    (group,) = groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert group.kv_cache_spec.kv_cache_specs["t"] == full(sliding_window=16)


HEADS_8 = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
HEADS_4 = SlidingWindowSpec(
    block_size=16, num_kv_heads=4, head_size=128, dtype="bfloat16", sliding_window=1024
)


def test_page_sizes():
    unified = unify_kv_cache_spec_page_size({"f": HEADS_8, "s": HEADS_4})
    assert unified == {"f": HEADS_8, "s": replace(HEADS_4, block_size=32)}
    with pytest.raises(NotImplementedError, match="Layer s has KV pages of 24576 bytes"):
        unify_kv_cache_spec_page_size({"f": HEADS_8, "s": replace(HEADS_4, num_kv_heads=3)})


def test_states_are_padded():
    unified = unify_kv_cache_spec_page_size({"f": HEADS_8, "m": mamba()})
    assert unified["m"] == replace(mamba(), page_size_padded=65536)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_blocks_of_attention_grow_to_the_size_of_a_state(mode):
    """Until a page is no smaller; kept states have their borders at the same tokens."""
    state = replace(mamba(mode, block_size=16), shapes=((40_000,),))
    unified = unify_kv_cache_spec_page_size({"f": HEADS_8, "s": HEADS_4, "m": state})
    page = 3 * 65_536
    assert {spec.page_size_bytes for spec in unified.values()} == {page}
    assert {name: spec.block_size for name, spec in unified.items()} == {
        "f": 48,
        "s": 96,
        "m": 16 if mode == "none" else 48,
    }


def test_chunks_must_begin_at_blocks():
    with pytest.raises(ConfigError, match=r"attention_chunk_size 6 is not a multiple .* size 4"):
        get_kv_cache_groups(HYBRID, layers(c=(2, chunked(6))))
    # 4 heads against 8: a block of the chunked layers becomes 8 tokens.
    small, big = chunked(12, num_kv_heads=4), full(num_kv_heads=8)
    with pytest.raises(ConfigError, match=r"attention_chunk_size 12 is not a multiple .* size 8"):
        get_kv_cache_groups(HYBRID, {"f": big, "c": small})
    with pytest.raises(ConfigError, match="6"):
        get_kv_cache_groups(HYBRID, {"a": chunked(6), "b": chunked(6, num_kv_heads=2)})
