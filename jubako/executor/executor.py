"""What does the engine ask of its workers, and which executor runs them?"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jubako.config import JubakoConfig
from jubako.errors import ConfigError, NotImplementedFeatureError
from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.specs import KVCacheSpec
from jubako.scheduler.model_output import DraftTokenIds, ModelRunnerOutput
from jubako.scheduler.output import GrammarOutput, SchedulerOutput

BUILT = ("uni",)
PLANNED = ("mp", "ray", "external_launcher")


class Executor(abc.ABC):
    """Runs methods on all workers of an engine, in order, exactly once each."""

    supports_pp = False
    """Whether the model may be split into pipeline stages."""

    def __init__(self, config: JubakoConfig, checkpoint: Any) -> None:
        """Start the workers: device, then weights."""
        self.config = config
        self.checkpoint = checkpoint
        self._supported_tasks: tuple[str, ...] | None = None

    @staticmethod
    def get_class(config: JubakoConfig) -> type[Executor]:
        """The executor that `distributed_executor_backend` names.

        A subclass is used as it is, a dotted name is imported. TypeError for a class that is no
        executor, ConfigError for an unknown or planned one.
        """
        backend: Any = config.parallel_config.distributed_executor_backend
        if backend is None or backend == "uni":
            from jubako.executor.uniproc import UniProcExecutor

            return UniProcExecutor
        name = "distributed_executor_backend"
        if isinstance(backend, str):
            if backend in PLANNED:
                raise ConfigError(f"{name}={backend!r} is not built yet; use 'uni'.", name)
            module, _, attribute = backend.rpartition(".")
            if not module:
                raise ConfigError(
                    f"{name}={backend!r} is unknown; there is {', '.join(map(repr, BUILT))}, or "
                    "the dotted name of an Executor class.",
                    name,
                )
            try:
                backend = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"{name}={backend!r} cannot be imported: {error}.", name
                ) from error
        if not (isinstance(backend, type) and issubclass(backend, Executor)):
            raise TypeError(f"{name} must be a subclass of Executor, got {backend!r}")
        return backend

    # -- calls to workers ---------------------------------------------------------------------

    @abc.abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Run a worker method (its name, or a callable that gets the worker first) on every rank.

        Returns one result a rank, or a `Future` of that list. `timeout` is in seconds.
        """

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """First phase of a step on every rank; the output rank's result, or a `Future` of it.

        None means that `sample_tokens` is to follow.
        """
        return self._output_of("execute_model", scheduler_output, non_block)

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Second phase of a step; legal only after an `execute_model` that gave None."""
        return self._output_of("sample_tokens", grammar_output, non_block)

    @abc.abstractmethod
    def _output_of(self, method: str, argument: Any, non_block: bool) -> Any:
        """The output rank's result of a step method."""

    # -- start-up -----------------------------------------------------------------------------

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight."""
        return 2 if self.config.scheduler_config.async_scheduling else 1

    def determine_available_memory(self) -> list[int]:
        """Bytes for the KV cache, one value a rank."""
        result: list[int] = self.collective_rpc("determine_available_memory")
        return result

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """What the layers keep in the KV cache, one dict a rank."""
        result: list[dict[str, KVCacheSpec]] = self.collective_rpc("get_kv_cache_spec")
        return result

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """Allocate the KV cache, one config a rank, and warm up."""
        self._initialize_kv(kv_cache_configs)
        self.collective_rpc("compile_or_warm_up_model")

    @abc.abstractmethod
    def _initialize_kv(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """Give each rank its config."""

    # -- control ------------------------------------------------------------------------------

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        if self._supported_tasks is None:
            self._supported_tasks = self.collective_rpc("get_supported_tasks")[0]
        return self._supported_tasks

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Call back, at most once, when the executor becomes unusable for good.

        An executor whose workers cannot die alone never calls.
        """
        return

    @abc.abstractmethod
    def check_health(self) -> None:
        """Raise if a worker cannot run steps."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the workers. May be called again."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts of the step; None, as nothing proposes any."""
        return None

    def execute_dummy_batch(self) -> None:
        """Run a step on made-up tokens, to keep idle data-parallel ranks in step."""
        self.collective_rpc("execute_dummy_batch")

    def reset_mm_cache(self) -> None:
        """Forget received media; there are none."""
        return

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs; there are none."""
        return

    def init_kv_output_aggregator(self, connector: Any) -> None:
        """Merge what the workers' KV connectors report; one worker needs no merging."""
        return

    def list_loras(self) -> set[int]:
        """Ids of loaded adapters."""
        return set()

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter."""
        raise _not_built("Adapters")

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        raise _not_built("Adapters")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        raise _not_built("Adapters")

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`."""
        raise _not_built("Sleeping")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again."""
        raise _not_built("Sleeping")

    def profile(self, start: bool = True) -> None:
        """Start or end profiling."""
        raise _not_built("Profiling")

    def save_sharded_state(self, path: str) -> None:
        """Write the workers' weights."""
        raise _not_built("Saving weights")


def _not_built(what: str) -> NotImplementedFeatureError:
    return NotImplementedFeatureError(f"{what} is not built yet.")
