"""Open options take the values that the checkpoint and the machine call for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jubako.checkpoint.info import Checkpoint
from jubako.config import JubakoConfig
from jubako.engine import setup
from jubako.engine.setup import Machine, complete_config, resolve_dtype, resolve_max_model_len
from jubako.errors import CheckpointError, ConfigError

CPU = Machine("cpu", bfloat16=True, float16=False)
OLD_CPU = Machine("cpu", bfloat16=False, float16=False)
GPU = Machine("cuda", True, True, 24 << 30, "NVIDIA L4")
LARGE_GPU = Machine("cuda", True, True, 139 << 30, "NVIDIA H200")
A100 = Machine("cuda", True, True, 80 << 30, "NVIDIA A100-SXM4-80GB")

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 1000,
    "torch_dtype": "bfloat16",
}


def checkpoint(kind: Any = "hf", **changes: Any) -> Checkpoint:
    config = {k: v for k, v in (MODEL | changes).items() if v is not None}
    return Checkpoint(kind, Path("m"), "m", config, {"eos_token_id": 7}, (7, 9))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Machine]:
    machines = {"this": CPU}
    monkeypatch.setattr(setup, "probe_machine", lambda device: machines["this"])
    return machines


def complete(usage: Any = "llm", model: Checkpoint | None = None, **options: Any) -> JubakoConfig:
    return complete_config(JubakoConfig.from_options(options), model or checkpoint(), usage=usage)


def test_the_model_is_described() -> None:
    model = complete().model_config
    assert model.hf_config["vocab_size"] == model.vocab_size == 100
    assert model.architecture == "LlamaForCausalLM"
    assert model.eos_token_ids == (7, 9)
    assert model.generation_config == {"eos_token_id": 7}
    assert model.max_model_len == 1000


@pytest.mark.parametrize(
    ("machine_now", "usage", "tokens", "seqs"),
    [
        (CPU, "llm", 4096, 256),
        (CPU, "server", 2048, 128),
        (GPU, "llm", 8192, 256),
        (GPU, "server", 2048, 256),
        (LARGE_GPU, "llm", 16384, 1024),
        (LARGE_GPU, "server", 8192, 1024),
        (A100, "llm", 8192, 256),
    ],
)
def test_defaults_of_the_scheduler(
    machine: dict[str, Machine], machine_now: Machine, usage: Any, tokens: int, seqs: int
) -> None:
    machine["this"] = machine_now
    scheduler = complete(usage).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)


def test_a_default_gives_way_to_what_was_asked_for() -> None:
    assert complete(max_num_batched_tokens=64).scheduler_config.max_num_seqs == 64
    assert complete(max_num_seqs=5000).scheduler_config.max_num_batched_tokens == 5000
    with pytest.raises(ConfigError, match="max_num_seqs=65"):
        complete(max_num_batched_tokens=64, max_num_seqs=65)


def test_without_chunked_prefill_a_step_holds_the_longest_prompt() -> None:
    model = checkpoint(max_position_embeddings=9000)
    config = complete(model=model, enable_chunked_prefill=False)
    assert config.scheduler_config.max_num_batched_tokens == 9000
    with pytest.raises(ConfigError, match=r"64.*9000"):
        complete(model=model, enable_chunked_prefill=False, max_num_batched_tokens=64)


def test_cache_defaults(machine: dict[str, Machine]) -> None:
    assert complete().cache_config.block_size == 32
    assert complete().cache_config.enable_prefix_caching is True
    assert complete(block_size=8, enable_prefix_caching=False).cache_config.block_size == 8
    assert complete(enable_prefix_caching=False).cache_config.enable_prefix_caching is False
    machine["this"] = GPU
    assert complete().cache_config.block_size == 16
    assert complete().device_config.device == "cuda"


def test_a_context_may_be_shortened_only_if_nobody_chose_its_size() -> None:
    assert complete().model_config.original_max_model_len == -1
    for options in (
        {"max_model_len": 500},
        {"num_gpu_blocks_override": 5},
        {"kv_cache_memory_bytes": 5000},
    ):
        assert complete(**options).model_config.original_max_model_len != -1


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_more_than_one_worker_is_not_built(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2 is not built"):
        complete(**{name: 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_kv_cache_events", True),
        ("use_int_block_hashes", True),
        ("disable_chunked_mm_input", True),
    ],
)
def test_an_option_that_no_engine_has_a_use_for_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is not built"):
        complete(**{name: value})


@pytest.mark.parametrize("name", ["encoder_cache_size", "max_num_encoder_input_tokens"])
def test_options_of_an_encoder_need_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=5 is for encoder-decoder models"):
        complete(**{name: 5})


def test_steps_overlap_on_a_cpu_only_if_asked_for() -> None:
    assert complete().scheduler_config.async_scheduling is False
    assert complete(async_scheduling=False).scheduler_config.async_scheduling is False
    assert complete(async_scheduling=True).scheduler_config.async_scheduling is True


def test_steps_overlap_on_a_gpu_unless_forbidden(machine: dict[str, Machine]) -> None:
    machine["this"] = GPU
    assert complete().scheduler_config.async_scheduling is True
    assert complete(async_scheduling=False).scheduler_config.async_scheduling is False
    other = complete(distributed_executor_backend="some.Executor")
    assert other.scheduler_config.async_scheduling is False


# -- length -----------------------------------------------------------------------------------


def test_a_length_above_the_models_names_both() -> None:
    assert resolve_max_model_len(1000, MODEL) == 1000
    assert resolve_max_model_len(5, MODEL) == 5
    with pytest.raises(ConfigError, match=r"1001.*1000") as caught:
        resolve_max_model_len(1001, MODEL)
    assert caught.value.parameter == "max_model_len"


def test_a_model_that_does_not_say_its_length() -> None:
    assert resolve_max_model_len(5000, {}) == 5000
    with pytest.raises(ConfigError, match="set max_model_len"):
        resolve_max_model_len(None, {})


@pytest.mark.parametrize("value", [0, -1, "many", 1.5, True, [1]])
def test_nonsense_in_a_checkpoint(value: Any) -> None:
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        complete(model=checkpoint(max_position_embeddings=value))
    with pytest.raises(CheckpointError, match="vocab_size"):
        complete(model=checkpoint(vocab_size=value))
    with pytest.raises(CheckpointError, match="architecture"):
        complete(model=checkpoint(architectures=value))


def test_sizes_may_stand_in_the_part_for_text() -> None:
    part = {"vocab_size": 50, "max_position_embeddings": 20, "dtype": "float32"}
    model = checkpoint(
        vocab_size=None, max_position_embeddings=None, torch_dtype=None, text_config=part
    )
    config = complete(model=model).model_config
    assert (config.vocab_size, config.max_model_len, config.dtype) == (50, 20, "float32")


# -- dtype ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "kind", "machine_now", "expected"),
    [
        ("bfloat16", "hf", CPU, "bfloat16"),
        ("bfloat16", "hf", OLD_CPU, "float32"),
        ("bfloat16", "hf", GPU, "bfloat16"),
        ("bfloat16", "gguf", CPU, "bfloat16"),
        ("float32", "hf", CPU, "float32"),
        ("float32", "gguf", GPU, "float32"),
        ("float16", "hf", GPU, "float16"),
        ("float16", "hf", CPU, "float32"),
        ("float16", "gguf", CPU, "bfloat16"),
        ("torch.bfloat16", "hf", CPU, "bfloat16"),
        (None, "hf", CPU, "bfloat16"),
    ],
)
def test_automatic_dtype(own: str | None, kind: Any, machine_now: Machine, expected: str) -> None:
    assert resolve_dtype("auto", checkpoint(kind, torch_dtype=own), machine_now) == expected


def test_a_dtype_that_was_asked_for() -> None:
    for wanted, name in (("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")):
        assert resolve_dtype(wanted, checkpoint(), OLD_CPU) == name


def test_gemma_never_runs_in_float16() -> None:
    gemma = checkpoint(model_type="gemma3_text", torch_dtype="float16")
    assert resolve_dtype("auto", gemma, GPU) == "bfloat16"
    with pytest.raises(ConfigError, match="float16"):
        resolve_dtype("half", gemma, GPU)


def test_states_of_recurrent_layers_are_kept_for_prefix_caching() -> None:
    hybrid = checkpoint(architectures=["BambaForCausalLM"])
    cache = complete(model=hybrid).cache_config
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode) == (True, "all")
    cache = complete(model=hybrid, mamba_cache_mode="align").cache_config
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode) == (True, "align")
    cache = complete(model=hybrid, enable_prefix_caching=False).cache_config
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode) == (False, "none")
    with pytest.raises(ConfigError, match="no recurrent layers"):
        complete(mamba_cache_mode="align")
