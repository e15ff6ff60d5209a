"""Options: one definition gives the field, the flag and the environment variable."""

from __future__ import annotations

import argparse
import dataclasses
import math

import pytest

from jubako.config import ENGINE_CONCERNS, JubakoConfig, SchedulerConfig, ServerConfig
from jubako.config.options import add_arguments, parse_size
from jubako.errors import ConfigError


def parse(arguments: list[str], env: dict[str, str] | None = None) -> JubakoConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, ENGINE_CONCERNS, env or {})
    return JubakoConfig.from_options(vars(parser.parse_args(arguments)))


def test_no_flags_give_the_defaults() -> None:
    assert parse([]) == JubakoConfig()


def test_flag_reaches_its_field() -> None:
    config = parse(["--max-model-len", "77", "--no-enable-prefix-caching", "--dtype", "float32"])
    assert config.model_config.max_model_len == 77
    assert config.cache_config.enable_prefix_caching is False
    assert config.model_config.dtype == "float32"


def test_every_option_has_a_flag_and_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    concerns = (*ENGINE_CONCERNS, ServerConfig)
    add_arguments(parser, concerns, {})
    text = parser.format_help()
    for concern in concerns:
        for field in dataclasses.fields(concern):
            if "help" in field.metadata:
                assert "--" + field.name.replace("_", "-") in text
                assert field.metadata["help"]


def test_environment_stands_below_the_flag() -> None:
    env = {"JUBAKO_MAX_NUM_SEQS": "5", "JUBAKO_ENABLE_PREFIX_CACHING": "off"}
    assert parse([], env).scheduler_config.max_num_seqs == 5
    assert parse([], env).cache_config.enable_prefix_caching is False
    assert parse(["--max-num-seqs", "6"], env).scheduler_config.max_num_seqs == 6


def test_bad_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"JUBAKO_MAX_NUM_SEQS.*many"):
        parse([], {"JUBAKO_MAX_NUM_SEQS": "many"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5k", 1536), ("2 GiB", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse(["--kv-cache-memory-bytes", text]).cache_config.kv_cache_memory_bytes == size


@pytest.mark.parametrize("text", ["", "GiB", "4XB", "four", "1e", "1e400"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, ["block_size", "0", "at least 1"]),
        ({"block_size": "16"}, ["block_size", "16", "int"]),
        ({"max_model_len": -1}, ["max_model_len", "-1"]),
        ({"watermark": 1.0}, ["watermark", "1.0", "below 1"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5"]),
        ({"dtype": "int3"}, ["dtype", "int3", "bfloat16"]),
        ({"device": "tpu"}, ["device", "tpu", "cpu"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy", "lifo", "fcfs"]),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ["max_num_seqs", "9", "8"]),
        ({"no_such_option": 1}, ["no_such_option"]),
        ({"num_threads": 0}, ["num_threads", "0"]),
        ({"num_threads": 100_000}, ["num_threads", "100000", "1024"]),
        ({"max_model_len": 10**26}, ["max_model_len", "1" + "0" * 26, str(2**63 - 1)]),
        ({"num_gpu_blocks_override": 2**70}, ["num_gpu_blocks_override", str(2**70)]),
        ({"seed": -1}, ["seed", "-1", "at least 0"]),
        ({"seed": 2**63}, ["seed", str(2**63)]),
    ],
)
def test_bad_options_are_named_with_value_and_limit(
    options: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        JubakoConfig.from_options(options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_drain_takes_no_less_than_nothing(seconds: float) -> None:
    with pytest.raises(ConfigError, match="drain_timeout"):
        ServerConfig(drain_timeout=seconds)


def test_replace_makes_a_new_config() -> None:
    old = JubakoConfig()
    new = old.replace(model_config={"max_model_len": 5})
    assert new.model_config.max_model_len == 5
    assert old.model_config.max_model_len is None


def test_a_small_budget_lowers_the_default_number_of_requests() -> None:
    assert SchedulerConfig(max_num_batched_tokens=64).seq_limit == 64
