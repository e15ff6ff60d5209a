"""How many bytes may the KV cache take?"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kv_cache.grouping import get_kv_cache_groups
from jubako.kv_cache.sizing import (
    get_kv_cache_config_from_groups,
    get_max_concurrency_for_kv_cache_config,
)
from jubako.kv_cache.specs import KVCacheSpec
from jubako.worker.model_runner import ModelRunner

_MEASURED_TOKENS = 256
"""Tokens of the dummy step on a CPU. A full step would cost start-up a second; activations grow in
proportion, so its peak is extrapolated."""

_SAMPLING_BYTES = 12
"""Bytes that sampling holds per logit at its peak: the model's own, float32, and one more."""

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def cpu_budget(
    config: JubakoConfig, specs: Mapping[str, KVCacheSpec], available: int, peak: int
) -> int:
    """Half of the `available` bytes less the `peak` of a step, and no more than can be used.

    What can be used are `max_num_seqs` requests of `max_model_len`.
    """
    budget = available // 2 - peak
    if budget <= 0 or not specs:
        return max(budget, 0)
    groups = get_kv_cache_groups(config, dict(specs))
    if not groups:
        # Nothing is kept between steps.
        return 0
    probe = get_kv_cache_config_from_groups(config, groups, budget)
    if not probe.num_blocks:
        return budget
    bytes_per_block = sum(tensor.size for tensor in probe.kv_cache_tensors) // probe.num_blocks
    concurrency = get_max_concurrency_for_kv_cache_config(config, probe)
    if not concurrency:
        return budget
    per_request = probe.num_blocks / concurrency
    # One more for the null block.
    usable = math.ceil(config.scheduler_config.seq_limit * per_request) + 1
    return min(budget, usable * bytes_per_block)


def peak_of_dummy_step(runner: ModelRunner) -> int:
    """Bytes that a full step takes at its peak on a CPU, estimated from a short one."""
    tokens = min(_MEASURED_TOKENS, runner.max_num_tokens)
    before = _reset_peak()
    runner.dummy_run(tokens, num_logits_rows=1)
    growth = max(0, _resident("VmHWM") - before)
    # What the encoder reads in a step does not grow with the step's tokens.
    before = _reset_peak()
    runner.dummy_encode()
    encoder = max(0, _resident("VmHWM") - before)
    logits_rows = min(runner.max_num_reqs, runner.max_num_tokens)
    sampling = logits_rows * runner.vocab_size * _SAMPLING_BYTES
    return growth * runner.max_num_tokens // tokens + encoder + sampling


def _reset_peak() -> int:
    """Let the peak of resident memory count from now on; returns what is resident."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        # Not Linux, or not permitted: the peak counts from the start of the process.
        return _resident("VmHWM")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    """A field of the process's status in bytes; 0 where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def cuda_budget(
    config: JubakoConfig, runner: ModelRunner, device: torch.device, free_before_load: int
) -> int:
    """Bytes left of the engine's share of a GPU after weights and the peak of a full step.

    `free_before_load` is what was free before the weights came. ConfigError if the share is not.
    """
    _, total = torch.cuda.mem_get_info(device)
    share = config.cache_config.gpu_memory_utilization
    requested = math.ceil(total * share)
    if requested > free_before_load:
        raise ConfigError(
            f"gpu_memory_utilization={share} asks for {requested / 2**30:.2f} GiB, but only "
            f"{free_before_load / 2**30:.2f} of {total / 2**30:.2f} GiB were free at start; lower "
            "it, or end what else uses the GPU.",
            "gpu_memory_utilization",
        )
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    in_use = torch.cuda.memory_allocated(device)
    runner.dummy_encode()
    runner.dummy_run(runner.max_num_tokens, min(runner.max_num_reqs, runner.max_num_tokens))
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - in_use
    gc.collect()
    torch.cuda.empty_cache()
    # Weights, and what libraries took beside PyTorch's allocator.
    free, _ = torch.cuda.mem_get_info(device)
    return requested - (free_before_load - free) - activations
