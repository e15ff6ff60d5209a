"""Bytes and pages of every spec, merging, and the way over the wire."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from jubako.kv_cache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    decode_kv_cache_config,
    decode_spec,
    encode_kv_cache_config,
    encode_spec,
    is_kv_cache_spec_uniform,
)

from .fakes import engine_config

HEADS = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)
FULL_V64 = FullAttentionSpec(**HEADS, head_size_v=64)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
MLA_FP8 = replace(MLA, cache_dtype_str="fp8_ds_mla")
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=1024)
CHUNKED = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=4096)
MAMBA = MambaSpec(
    block_size=16,
    shapes=((3, 1024), (16, 64, 128)),
    dtypes=("bfloat16", "float32"),
    num_speculative_blocks=2,
)
CROSS = CrossAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16")
ENCODER = EncoderOnlyAttentionSpec(**HEADS)
SINK = SinkFullAttentionSpec(**HEADS, sink_len=32)
UNIFORM = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL_V64})
ALL = [FULL, FULL_V64, MLA, MLA_FP8, WINDOW, CHUNKED, MAMBA, CROSS, ENCODER, SINK, UNIFORM]


@pytest.mark.parametrize(
    ("spec", "page", "pages", "config"),
    [
        (FULL, 65536, 512, {}),
        (FULL, 65536, 128, {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}),
        (FULL_V64, 49152, 512, {}),
        (replace(FULL, page_size_padded=70000), 70000, 512, {}),
        (MLA, 73728, 128, {}),
        (MLA_FP8, 41984, 128, {}),
        (WINDOW, 65536, 193, {}),
        (WINDOW, 65536, 189, {"max_model_len": 3000}),
        (CHUNKED, 65536, 384, {}),
        (CHUNKED, 65536, 313, {"max_model_len": 5000}),
        (MAMBA, 530432, 3, {"mamba_cache_mode": "none"}),
        (MAMBA, 530432, 4, {"mamba_cache_mode": "align"}),
        (MAMBA, 530432, 514, {"mamba_cache_mode": "all"}),
        (CROSS, 32768, 94, {}),
        (ENCODER, 65536, 0, {}),
        (SINK, 65536, 512, {}),
        (UNIFORM, 114688, 512, {}),
    ],
)
def test_pages(spec, page, pages, config):
    assert spec.page_size_bytes == page
    assert spec.max_memory_usage_bytes(engine_config(**config)) == page * pages


def test_uniform_bytes():
    assert UNIFORM.max_memory_usage_bytes(engine_config()) == 58_720_256


def test_base_is_abstract():
    with pytest.raises(NotImplementedError):
        _ = KVCacheSpec(block_size=4).page_size_bytes
    with pytest.raises(NotImplementedError):
        KVCacheSpec(block_size=4).max_memory_usage_bytes(engine_config())


def test_padding_must_cover_the_page():
    with pytest.raises(AssertionError, match=r"page_size_padded 100 is below.* 65536"):
        _ = replace(FULL, page_size_padded=100).page_size_bytes
    with pytest.raises(AssertionError, match="530432"):
        _ = replace(MAMBA, page_size_padded=100).page_size_bytes


def test_unknown_dtype():
    with pytest.raises(ValueError, match=r"'bf17' is unknown; known are .*bfloat16"):
        _ = replace(FULL, dtype="bf17").page_size_bytes


def test_window_refuses_context_parallelism():
    with pytest.raises(AssertionError, match="decode_context_parallel_size is 2"):
        WINDOW.max_memory_usage_bytes(engine_config(decode_context_parallel_size=2))


def test_admission_cap_is_the_startup_size():
    assert WINDOW.max_admission_blocks_per_request(2048, 8192) == 193
    assert CHUNKED.max_admission_blocks_per_request(2048, 5000) == 313


def test_specs_are_frozen_values():
    assert FullAttentionSpec(**HEADS) == FULL
    assert len({FULL, FullAttentionSpec(**HEADS), WINDOW}) == 2
    assert replace(SINK, sink_len=None) != FULL
    with pytest.raises(AttributeError):
        FULL.block_size = 8
    with pytest.raises(TypeError):
        hash(UNIFORM)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: type(spec).__name__)
def test_new_block_size(spec):
    copy = spec.copy_with_new_block_size(32)
    assert copy.block_size == 32
    assert spec.block_size != 32
    if not isinstance(spec, MambaSpec):
        assert copy.page_size_bytes == spec.page_size_bytes * 32 // spec.block_size


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: type(spec).__name__)
def test_wire(spec):
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_spec(spec)))
    assert wire["type"] == type(spec).__name__
    assert decode_spec(wire) == spec
    assert decode_spec(encode_spec(spec)) == spec


def test_wire_refuses_unknown_types():
    with pytest.raises(ValueError, match="'object' is no KV cache spec"):
        decode_spec({"type": "object", "block_size": 4})


def test_config_wire():
    config = KVCacheConfig(
        7,
        [KVCacheTensor(700, ["a", "b"])],
        [KVCacheGroupSpec(["a"], FULL, True), KVCacheGroupSpec(["b"], UNIFORM)],
    )
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_kv_cache_config(config)))
    assert decode_kv_cache_config(wire) == config


# Merging


@pytest.mark.parametrize("spec", [WINDOW, CHUNKED, MAMBA, CROSS, FULL, MLA_FP8, SINK])
def test_equal_specs_merge(spec):
    assert type(spec).merge([spec, replace(spec)]) == spec


@pytest.mark.parametrize("spec", [WINDOW, CHUNKED, MAMBA, CROSS, FULL, MLA, SINK])
def test_different_block_sizes_do_not_merge(spec):
    with pytest.raises(AssertionError):
        type(spec).merge([spec, replace(spec, block_size=128)])


def test_full_remembers_a_window_or_a_chunk_size():
    windowed, chunked = replace(FULL, sliding_window=8), replace(FULL, attention_chunk_size=8)
    assert FullAttentionSpec.merge([FULL, windowed, FULL]) == windowed
    assert FullAttentionSpec.merge([chunked, FULL]) == chunked
    with pytest.raises(ValueError, match=r"sliding windows .*\[8, 9\]"):
        FullAttentionSpec.merge([windowed, replace(FULL, sliding_window=9)])
    with pytest.raises(ValueError, match=r"chunk sizes .*\[8, 9\]"):
        FullAttentionSpec.merge([chunked, replace(FULL, attention_chunk_size=9)])
    with pytest.raises(AssertionError, match="sliding window 8 and attention chunk size 8"):
        FullAttentionSpec.merge([windowed, chunked])


def test_full_merges_only_its_own_type():
    for other in (MLA.copy_with_new_block_size(16), WINDOW, SINK, replace(FULL, num_kv_heads=4)):
        with pytest.raises(AssertionError):
            FullAttentionSpec.merge([FULL, other])


def test_mla_needs_one_cache_dtype():
    with pytest.raises(AssertionError, match="cache_dtype_str"):
        MLAAttentionSpec.merge([MLA, MLA_FP8])
    with pytest.raises(AssertionError, match="not all MLA"):
        MLAAttentionSpec.merge([MLA, FULL])


def test_sinks_must_agree():
    assert SinkFullAttentionSpec.merge([SINK, SINK]).sink_len == 32
    with pytest.raises(AssertionError):
        SinkFullAttentionSpec.merge([SINK, replace(SINK, sink_len=16)])


def test_uniform_spec():
    assert is_kv_cache_spec_uniform({})
    assert is_kv_cache_spec_uniform({"a": FULL, "b": replace(FULL, sliding_window=8)})
    assert not is_kv_cache_spec_uniform({"a": FULL, "b": WINDOW})
    two_windows = {"a": replace(FULL, sliding_window=8), "b": replace(FULL, sliding_window=9)}
    assert not is_kv_cache_spec_uniform(two_windows)
    assert UniformTypeKVCacheSpecs.is_uniform_type(two_windows)


@pytest.mark.parametrize(
    ("specs", "uniform"),
    [
        ([FULL, FULL_V64], True),
        ([SINK, replace(SINK, num_kv_heads=4)], True),
        ([FULL, SINK], False),
        ([SINK, replace(SINK, sink_len=16)], False),
        ([FULL, WINDOW], False),
        ([FULL, FULL.copy_with_new_block_size(32)], False),
        ([CROSS, replace(CROSS, num_kv_heads=4)], True),
        ([CROSS, FULL], False),
        ([WINDOW, replace(WINDOW, num_kv_heads=4)], True),
        ([WINDOW, replace(WINDOW, sliding_window=8)], False),
        ([CHUNKED, replace(CHUNKED, num_kv_heads=4)], True),
        ([CHUNKED, replace(CHUNKED, attention_chunk_size=8)], False),
        ([MAMBA, replace(MAMBA, shapes=((3,), (4,)))], True),
        ([MAMBA, replace(MAMBA, num_speculative_blocks=0)], False),
    ],
)
def test_uniform_type(specs, uniform):
    layers = {str(i): spec for i, spec in enumerate(specs)}
    assert UniformTypeKVCacheSpecs.is_uniform_type(layers) == uniform
    made = UniformTypeKVCacheSpecs.from_specs(layers)
    if uniform:
        assert made.kv_cache_specs == layers
        assert made.block_size == specs[0].block_size
    else:
        assert made is None


def test_uniform_type_without_a_rule():
    with pytest.raises(NotImplementedError, match="EncoderOnlyAttentionSpec"):
        UniformTypeKVCacheSpecs.is_uniform_type({"a": ENCODER})
