"""From memory to blocks, tensors and lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jubako.errors import ConfigError
from jubako.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    estimate_max_model_len,
    fit_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity_tokens,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
    resolve_kv_cache_block_sizes,
)

from .fakes import config_of, engine_config, full, mamba, window

HEADS = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)
FULL_4 = replace(FULL, num_kv_heads=4)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=1024)
PAGE = 65536


def model(n_full: int, n_window: int = 0) -> dict:
    layers = {f"f{i}": FULL for i in range(n_full)}
    return layers | {f"s{i}": WINDOW for i in range(n_window)}


def config_for(layers: dict, memory: int, **values) -> KVCacheConfig:
    config = engine_config(**values)
    return get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, layers), memory)


def test_two_and_four_layers():
    config = config_for(model(2, 4), 10**9)
    assert config.num_blocks == 7629
    assert [(t.size, t.shared_by) for t in config.kv_cache_tensors] == [
        (499_974_144, ["f0", "s0", "s1"]),
        (499_974_144, ["f1", "s2", "s3"]),
    ]


def test_three_and_five_layers():
    config = config_for(model(3, 5), 10**9)
    assert config.num_blocks == 5086
    assert config.kv_cache_tensors[2].shared_by == ["f2", "s4"]


def test_uniform_type():
    config = config_for({"a": FULL, "b": FULL_4}, 98_304_000)
    assert config.num_blocks == 1000
    assert [(t.size, t.shared_by) for t in config.kv_cache_tensors] == [
        (65_536_000, ["a"]),
        (32_768_000, ["b"]),
    ]


def test_no_layers():
    config = get_kv_cache_configs(engine_config(), [{}], [0])
    assert config == [KVCacheConfig(1, [], [])]


def test_override():
    assert config_for(model(2), 10**9, num_gpu_blocks_override=7).num_blocks == 7
    both = {"a": FULL, "b": FULL_4}
    assert config_for(both, 10**9, num_gpu_blocks_override=7).num_blocks == 7


def test_pages_must_be_equal():
    groups = [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], FULL_4)]
    with pytest.raises(AssertionError, match="page sizes"):
        get_kv_cache_config_from_groups(engine_config(), groups, 10**9)


def test_workers_agree_on_the_smallest():
    configs = get_kv_cache_configs(engine_config(), [model(2, 4)] * 2, [10**9, 8 * 10**8])
    assert [c.num_blocks for c in configs] == [6103, 6103]
    assert {t.size for c in configs for t in c.kv_cache_tensors} == {399_966_208}


def test_layer_with_two_specs():
    with pytest.raises(AssertionError, match="layer a has two"):
        get_kv_cache_configs(engine_config(), [{"a": FULL}, {"a": FULL_4}], [10**9] * 2)


def test_pipeline_stages_are_sized_by_their_own_layers():
    stages = [{"f0": FULL, "f1": FULL_4}, {"f2": FULL, "f3": FULL_4}]
    configs = get_kv_cache_configs(engine_config(), stages, [98_304_000] * 2)
    assert [c.num_blocks for c in configs] == [1000, 1000]
    assert [t.shared_by for t in configs[1].kv_cache_tensors] == [["f2"], ["f3"]]
    # A stage needs memory for its own layers only.
    one_request = 513 * PAGE
    configs = get_kv_cache_configs(
        engine_config(), [{"f0": FULL}, {"f1": FULL}], [one_request, one_request]
    )
    assert [c.num_blocks for c in configs] == [513, 513]


def test_stage_without_layers():
    configs = get_kv_cache_configs(engine_config(), [{}, model(2)], [0, 10**9])
    assert [c.num_blocks for c in configs] == [7629, 7629]
    assert configs[0].kv_cache_tensors == []
    uniform = {"a": FULL, "b": FULL_4}
    configs = get_kv_cache_configs(engine_config(), [{}, uniform], [0, 98_304_000])
    assert [c.num_blocks for c in configs] == [1000, 1000]
    assert generate_scheduler_kv_cache_config(configs).kv_cache_groups[0].kv_cache_spec == FULL


def test_no_memory():
    with pytest.raises(ConfigError, match="No memory is left for the KV cache"):
        get_kv_cache_configs(engine_config(), [model(2)], [0])


def test_too_little_memory_names_need_limit_and_length():
    with pytest.raises(ConfigError) as caught:
        get_kv_cache_configs(engine_config(), [model(2, 4)], [10**8])
    message = str(caught.value)
    # 512 + 193 + 193 blocks of one request, and the null block.
    for part in ("max_model_len 8192", str(899 * 2 * PAGE), "(100000000 bytes)", "At most 6000"):
        assert part in message, message


def test_longest_length_fits_and_one_more_does_not():
    memory = 5 * 10**7
    assert estimate_max_model_len(engine_config(), model(2, 4), memory) == 2016
    get_kv_cache_configs(engine_config(max_model_len=2016), [model(2, 4)], [memory])
    with pytest.raises(ConfigError):
        get_kv_cache_configs(engine_config(max_model_len=2017), [model(2, 4)], [memory])


def test_estimate_leaves_room_for_the_null_block():
    # 152 blocks, of which 151 hold tokens.
    assert estimate_max_model_len(engine_config(), model(2), 20_000_000) == 151 * 16
    assert estimate_max_model_len(engine_config(), model(2), PAGE) == 0
    assert estimate_max_model_len(engine_config(), model(2), 10**12) == 8192


def test_null_block_is_budgeted():
    layer, config = {"f0": FULL}, engine_config(max_model_len=64)
    with pytest.raises(ConfigError, match="At most 48 tokens"):
        get_kv_cache_configs(config, [layer], [4 * PAGE])
    assert get_kv_cache_configs(config, [layer], [5 * PAGE])[0].num_blocks == 5


def test_sinks_are_budgeted():
    layer = {"f0": SinkFullAttentionSpec(**HEADS, sink_len=32)}
    config = engine_config(max_model_len=64)
    with pytest.raises(ConfigError, match="At most 48 tokens"):
        get_kv_cache_configs(config, [layer], [6 * PAGE])
    assert get_kv_cache_configs(config, [layer], [7 * PAGE])[0].num_blocks == 7
    uniform = {"a": layer["f0"], "b": replace(layer["f0"], num_kv_heads=4)}
    with pytest.raises(ConfigError, match="At most 48 tokens"):
        get_kv_cache_configs(config, [uniform], [6 * (PAGE + PAGE // 2)])


def test_override_is_what_is_checked():
    config = engine_config(max_model_len=64, num_gpu_blocks_override=4)
    with pytest.raises(ConfigError, match="At most 48 tokens"):
        get_kv_cache_configs(config, [{"f0": FULL}], [10**9])
    config = engine_config(max_model_len=64, num_gpu_blocks_override=5)
    assert get_kv_cache_configs(config, [{"f0": FULL}], [1])[0].num_blocks == 5


def test_automatic_length():
    config = engine_config(original_max_model_len=-1)
    layers, memory = [model(2, 4)], [5 * 10**7]
    assert fit_max_model_len(config, layers, memory) == 2016
    assert get_kv_cache_configs(config, layers, memory)[0].num_blocks == 381
    for function in (fit_max_model_len, get_kv_cache_configs):
        with pytest.raises(ConfigError):
            function(config, layers, [PAGE])


def test_scheduler_config():
    configs = get_kv_cache_configs(engine_config(), [{"a": FULL, "b": FULL_4}], [98_304_000])
    scheduler = generate_scheduler_kv_cache_config(configs)
    assert scheduler.kv_cache_groups[0].kv_cache_spec == FULL
    assert isinstance(configs[0].kv_cache_groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)
    assert scheduler.kv_cache_groups[0] is not configs[0].kv_cache_groups[0]


def test_concurrency_and_capacity():
    config = config_for(model(2, 4), 10**9)
    concurrency = get_max_concurrency_for_kv_cache_config(engine_config(), config)
    assert concurrency == pytest.approx(8.4955, abs=1e-4)
    assert get_kv_cache_capacity_tokens(engine_config(), config) == int(7629 / 898 * 8192)
    assert get_max_concurrency_for_kv_cache_config(engine_config(), KVCacheConfig(1)) == 0.0


def sizes(*specs, **values):
    return resolve_kv_cache_block_sizes(config_of(list(specs), 10), engine_config(**values))


def test_block_sizes():
    assert sizes() == (16, 16)
    assert sizes(full(4)) == (4, 4)
    ranks = {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}
    assert sizes(full(4), **ranks) == (16, 16)
    assert sizes(full(4), window(8, 6)) == (12, 2)
    assert sizes(full(8), window(8, 12), hash_block_size=2) == (24, 2)
    with pytest.raises(ConfigError, match=r"hash_block_size 3 .*\[8, 12\]"):
        sizes(full(8), window(8, 12), hash_block_size=3)
    with pytest.raises(ConfigError, match="4 ranks"):
        sizes(full(4), window(8), **ranks)


def test_hash_size_without_prefix_caching():
    off = {"enable_prefix_caching": False}
    assert sizes(full(4), window(8, 6), **off) == (12, 12)
    assert sizes(full(4), window(8, 6), **off, kv_transfer_config="connector") == (12, 2)
    state = replace(mamba("none"), block_size=100)
    assert isinstance(state, MambaSpec)
    assert sizes(full(16), state, **off, kv_transfer_config="connector") == (400, 400)
