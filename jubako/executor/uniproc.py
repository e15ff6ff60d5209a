"""How does one worker run in the caller's own process?

Either in the caller's thread, or, so that the caller can plan a step while another is computed, in
a thread of its own. That thread does everything the worker ever does, one call after the other:
what belongs to a thread, as the choice of a GPU does, holds for all of it, and a step finds in the
batch the tokens that the step before it sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.executor.executor import Executor
from jubako.kv_cache.config import KVCacheConfig
from jubako.worker.worker import Worker


class UniProcExecutor(Executor):
    """One worker, called directly.

    Without `async_scheduling` a non-blocking call runs at once, and its future is done when it
    returns. With it calls are queued, and run in the order in which they were made.
    """

    def __init__(self, config: JubakoConfig, checkpoint: Any) -> None:
        """Build the worker, choose its device, load the model. `checkpoint` names the weights."""
        super().__init__(config, checkpoint)
        size = config.parallel_config.world_size
        if size != 1:
            raise ConfigError(
                f"The sizes of tensor, pipeline and context parallelism ask for {size} workers; "
                "more than one is not built yet. Set them to 1."
            )
        self._thread: ThreadPoolExecutor | None = None
        if config.scheduler_config.async_scheduling:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self.worker: Worker | None = Worker(config, checkpoint)
        try:
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
        except BaseException:
            self.shutdown()
            raise

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """See `Executor`. The call cannot be interrupted, so `timeout` has no effect."""

        def call() -> list[Any]:
            return [self._run(method, args, kwargs or {})]

        return self._call(call, non_block)

    def _output_of(self, method: str, argument: Any, non_block: bool) -> Any:
        def call() -> Any:
            return self._run(method, (argument,), {})

        return self._call(call, non_block)

    def _call(self, call: Callable[[], Any], non_block: bool) -> Any:
        if self._thread is not None:
            future = self._thread.submit(call)
            return future if non_block else future.result()
        return _resolved(call) if non_block else call()

    def _run(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if self.worker is None:
            raise RuntimeError("the executor was shut down")
        if callable(method):
            return method(self.worker, *args, **kwargs)
        return getattr(self.worker, method)(*args, **kwargs)

    def _initialize_kv(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        (kv_cache_config,) = kv_cache_configs
        self.collective_rpc("initialize_from_config", args=(kv_cache_config,))

    def check_health(self) -> None:
        """Nothing can die alone."""
        return

    def shutdown(self) -> None:
        if self.worker is not None:
            self.collective_rpc("shutdown")
            self.worker = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _resolved(call: Callable[[], Any]) -> Future[Any]:
    """A future that holds the result, or the exception, of `call`."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future
