"""What does a worker do besides running steps: device, model, memory, warm-up?"""

from __future__ import annotations

import gc
from typing import Any

import torch

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.specs import KVCacheSpec
from jubako.scheduler.model_output import ModelRunnerOutput
from jubako.scheduler.output import GrammarOutput, SchedulerOutput
from jubako.utils.cpu import available_memory
from jubako.utils.topology import compute_threads
from jubako.worker.memory_budget import cpu_budget, cuda_budget, peak_of_dummy_step
from jubako.worker.model_runner import ModelRunner

_WARM_UP_TOKENS = 16


class Worker:
    """One device and the part of the model on it.

    Methods are called in this order: `init_device`, `load_model`, `get_kv_cache_spec`,
    `determine_available_memory`, `initialize_from_config`, `compile_or_warm_up_model`, then steps.
    """

    def __init__(self, config: JubakoConfig, checkpoint: Any, rank: int = 0) -> None:
        """`checkpoint` is a `jubako.checkpoint.info.Checkpoint`."""
        self.config = config
        self.checkpoint = checkpoint
        self.rank = rank
        self.device = torch.device("cpu")
        self.model_runner: ModelRunner
        self._is_warm = False

    # -- start-up -----------------------------------------------------------------------------

    def init_device(self) -> None:
        """Choose the device and its threads. ConfigError if the machine does not have it."""
        self.device = choose_device(self.config.device_config.device)
        dtype = self.config.model_config.dtype
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(
                f"dtype={dtype!r} is not resolved to a dtype of the machine.", "dtype"
            )
        if self.device.type == "cpu":
            torch.set_num_threads(self.config.device_config.num_threads or compute_threads())
        else:
            torch.cuda.set_device(self.device)
            if dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
                raise ConfigError(
                    "This GPU does not compute in bfloat16; use dtype=float16 or float32.", "dtype"
                )
            gc.collect()
            torch.cuda.empty_cache()
            self._free_before_load, _ = torch.cuda.mem_get_info(self.device)
        self.model_runner = ModelRunner(self.config, self.device)

    def load_model(self) -> None:
        """Build the model and read its weights."""
        self.model_runner.load_model(self.checkpoint)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each attention layer keeps in the KV cache, by layer name."""
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take. Runs a dummy step, unless the number is configured."""
        configured = self.config.cache_config.kv_cache_memory_bytes
        if configured is not None:
            return configured
        if self.device.type == "cuda":
            return cuda_budget(self.config, self.model_runner, self.device, self._free_before_load)
        available = available_memory()
        self._is_warm = True
        peak = peak_of_dummy_step(self.model_runner)
        return cpu_budget(self.config, self.get_kv_cache_spec(), available, peak)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache."""
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        """Run one dummy step, so that the first request does not pay for what is done once."""
        if not self._is_warm:
            tokens = min(_WARM_UP_TOKENS, self.model_runner.max_num_tokens)
            self.model_runner.dummy_run(tokens, num_logits_rows=1)
            self.model_runner.dummy_encode()
            self._is_warm = True
        self.model_runner.reseed()
        if self.model_runner.kept_weights is not None:
            # Not before memory has been measured.
            self.model_runner.kept_weights.begin_writing()

    # -- steps --------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """First phase of a step; None means that `sample_tokens` is to follow."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Second phase of a step."""
        return self.model_runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """A one-token step that keeps idle ranks in step."""
        self.model_runner.dummy_run(1, num_logits_rows=1)

    # -- control ------------------------------------------------------------------------------

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return self.config.model_config.supported_tasks

    def check_health(self) -> None:
        """Return if the worker can run steps."""
        return

    def shutdown(self) -> None:
        """Let go of the model and the KV cache."""
        runner = getattr(self, "model_runner", None)
        if runner is not None:
            if runner.kept_weights is not None:
                runner.kept_weights.wait()
            del self.model_runner
            del runner
            gc.collect()


def choose_device(name: str) -> torch.device:
    """The device called `name` ("auto", "cpu", "cuda"); ConfigError if there is none."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "device=cuda, but PyTorch finds no CUDA device; use device=cpu.", "device"
        )
    if name == "cpu" or (name == "auto" and not has_cuda):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
