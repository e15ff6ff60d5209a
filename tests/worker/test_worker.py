"""Start-up of a worker: device, memory, KV tensors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jubako.errors import ConfigError
from jubako.kv_cache.config import KVCacheConfig, KVCacheTensor
from jubako.kv_cache.specs import FullAttentionSpec, SlidingWindowSpec
from jubako.worker.kv_memory import allocate_zeroed, bind_kv_tensors
from jubako.worker.memory_budget import cpu_budget, peak_of_dummy_step
from jubako.worker.worker import Worker, choose_device
from tests.worker.stub_model import StubLayer, StubModel, make_config, make_kv_config, make_runner
from tests.worker.test_input_batch import _resident_bytes

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32")


def stub_worker(**config: object) -> Worker:
    worker = Worker(make_config(**config), checkpoint=None)
    worker.init_device()
    layer = StubLayer("g0.0", salt=1)
    worker.model_runner.use_model(StubModel([layer]), {"g0.0": layer})
    return worker


def test_kv_memory_costs_nothing_until_it_is_written() -> None:
    before = _resident_bytes()
    buffer = allocate_zeroed(256 << 20, torch.device("cpu"))
    assert _resident_bytes() - before < 4 << 20
    buffer[: 16 << 20] = 1
    grown = _resident_bytes() - before
    assert 16 << 20 <= grown < 32 << 20
    assert not buffer[-1000:].any()


def test_layers_share_the_tensors_they_are_given() -> None:
    layers = {name: StubLayer(name, salt=1) for name in "abc"}
    config = KVCacheConfig(5, [KVCacheTensor(5 * 32, ["a", "b"]), KVCacheTensor(5 * 32, ["c"])], [])
    buffers = bind_kv_tensors(config, layers, dict.fromkeys("abc", (4, 4)), torch.device("cpu"))
    assert len(buffers) == 2
    assert layers["a"].kv.shape == (5, 4)
    layers["a"].kv[3, 2] = 77
    assert layers["b"].kv[3, 2] == 77
    assert not layers["c"].kv.any()


def test_a_layer_whose_kernel_splits_blocks_sees_more_of_them() -> None:
    layers = {"a": StubLayer("a", salt=1)}
    config = KVCacheConfig(5, [KVCacheTensor(5 * 64, ["a"])], [])
    bind_kv_tensors(config, layers, {"a": (8, 2)}, torch.device("cpu"))
    assert layers["a"].kv.shape == (20, 2)


def test_the_budget_is_half_of_memory_less_a_step() -> None:
    config = make_config(max_model_len=64, max_num_seqs=6)
    assert cpu_budget(config, {"a": FULL}, available=4000, peak=500) == 1500
    assert cpu_budget(config, {"a": FULL}, available=4000, peak=2500) == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_the_budget_is_no_more_than_can_be_used(layers: int) -> None:
    config = make_config(max_model_len=64, max_num_seqs=6)
    specs = {str(i): FULL for i in range(layers)}
    # 16 blocks a request, 6 requests, the null block; 32 bytes a block and layer.
    assert cpu_budget(config, specs, 1 << 30, 0) == (16 * 6 + 1) * 32 * layers


def test_the_usable_budget_counts_every_group() -> None:
    config = make_config(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8)
    window = SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=5
    )
    budget = cpu_budget(config, {"f": FULL, "s": window}, 1 << 30, 0)
    # Full: 16 blocks; window: ceil((5 - 1 + 8) / 4) + 1 = 4 blocks.
    assert budget == ((16 + 4) * 2 + 1) * 32


def test_a_configured_size_decides() -> None:
    worker = stub_worker(kv_cache_memory_bytes=12345)
    assert worker.determine_available_memory() == 12345


def test_the_measured_budget_is_positive_and_bounded() -> None:
    worker = stub_worker()
    assert worker.determine_available_memory() == (16 * 6 + 1) * 32
    worker.initialize_from_config(
        make_kv_config(list(worker.model_runner.layers.values()), ((4, None, 1),))
    )
    worker.compile_or_warm_up_model()


class HungryModel(StubModel):
    """Takes 256 KiB a token while it runs."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        eaten = torch.ones(len(input_ids), 1 << 18, dtype=torch.int8)
        hidden = super().__call__(input_ids, positions)
        return hidden + eaten[:, :1] - 1


def peak_of_hungry_step() -> int:
    """What a step of `HungryModel` is estimated to take."""
    runner = make_runner(make_config(max_num_batched_tokens=512, max_num_seqs=4))
    runner.use_model(HungryModel(runner.model.layers), runner.layers)
    return peak_of_dummy_step(runner)


def test_a_steps_peak_is_measured_and_extrapolated() -> None:
    # In a new process: one that has freed much before serves the step from what it still holds.
    code = f"from {__name__} import peak_of_hungry_step as peak; print(peak())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    assert 100 << 20 < int(done.stdout) < 180 << 20


def test_weights_are_not_counted_as_a_steps_peak() -> None:
    weights = torch.ones(64 << 20, dtype=torch.int8)
    runner = make_runner(make_config(max_num_batched_tokens=64, max_num_seqs=4))
    assert peak_of_dummy_step(runner) < 32 << 20
    assert weights[0] == 1


def test_cpu_is_chosen_without_cuda() -> None:
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert choose_device("auto").type == "cpu"
        with pytest.raises(ConfigError, match="device=cuda"):
            choose_device("cuda")


def test_threads_follow_the_option() -> None:
    before = torch.get_num_threads()
    try:
        worker = Worker(make_config(), checkpoint=None)
        worker.init_device()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_an_unresolved_dtype_is_an_error() -> None:
    config = make_config().replace(model_config={"dtype": "auto"})
    with pytest.raises(ConfigError, match="dtype='auto'"):
        Worker(config, checkpoint=None).init_device()


def test_a_worker_can_be_shut_down_at_any_time() -> None:
    Worker(make_config(), checkpoint=None).shutdown()
    worker = stub_worker()
    worker.shutdown()
    worker.shutdown()


def test_warm_up_does_not_shift_random_streams() -> None:
    worker = stub_worker()
    layers = list(worker.model_runner.layers.values())
    worker.initialize_from_config(make_kv_config(layers, ((4, None, 1),)))
    torch.rand(100)
    worker.compile_or_warm_up_model()
    first = torch.rand(3)
    torch.manual_seed(worker.config.model_config.seed)
    assert torch.equal(first, torch.rand(3))
    assert replace(worker.config) == worker.config
