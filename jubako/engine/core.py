"""What happens in one step of the engine, and who takes part in it?

`EngineCore` owns the scheduler and the executor. A step schedules, runs the model, and hands what
came back to the scheduler. An error that belongs to one request ends that request; an error of the
step itself ends the engine, since nobody knows what the workers hold then.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from jubako import __version__
from jubako.config import JubakoConfig
from jubako.engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    FinishReason,
)
from jubako.errors import (
    ConfigError,
    JubakoError,
    NotImplementedFeatureError,
    ValidationError,
)
from jubako.kv_cache import (
    KVCacheConfig,
    fit_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity_tokens,
    get_kv_cache_configs,
)
from jubako.scheduler.model_output import ModelRunnerOutput
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from jubako.checkpoint.info import Checkpoint
    from jubako.executor.executor import Executor

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _memory_explained(config: JubakoConfig) -> Iterator[None]:
    """Make a `ConfigError` of what the system says when there is too little memory."""
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        values = {
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "num_gpu_blocks_override": config.cache_config.num_gpu_blocks_override,
            "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        }
        given = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        raise ConfigError(
            "There is not enough memory for the model with these options; lower what needs "
            f"memory, or take a smaller model. The options are {given or 'the defaults'}."
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        # PyTorch has a type of its own for devices only.
        return "allocate memory" in str(error) or "out of memory" in str(error)
    # A size that no address can name overflows instead.
    return True


class Refusal:
    """A request that could not be taken, with the output that says so to its sender."""

    def __init__(self, request_id: str, client_index: int, message: str) -> None:
        self.client_index = client_index
        self.output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, error=message
        )


class EngineCore:
    """The engine without its surroundings: requests in, tokens out, one step at a time.

    `config` must be complete (`engine.setup`); the attribute of that name also has what was decided
    here. Not thread-safe but for `prepare` and `abort_soon`.
    """

    def __init__(
        self,
        config: JubakoConfig,
        checkpoint: Checkpoint,
        executor_class: Callable[[JubakoConfig, Checkpoint], Executor] | None = None,
        log_stats: bool = True,
    ) -> None:
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        if executor_class is None:
            from jubako.executor.executor import Executor

            executor_class = Executor.get_class(config)
        with _memory_explained(config):
            self.executor = executor_class(config, checkpoint)
        try:
            seconds["load_model"] = time.perf_counter() - started
            with _memory_explained(config):
                self.config, kv_cache_config = self._initialize_kv_cache(config)
            seconds["kv_cache"] = time.perf_counter() - started - seconds["load_model"]
            self.scheduler = Scheduler(self.config, kv_cache_config, log_stats=log_stats)
        except BaseException:
            self.executor.shutdown()
            raise
        self._pending: list[Refusal] = []
        self._aborts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.ready = self._describe(checkpoint, kv_cache_config, seconds)
        # What start-up made stays: cycle collection need not look at it again.
        gc.freeze()

    # -- start-up -----------------------------------------------------------------------------

    def _initialize_kv_cache(self, config: JubakoConfig) -> tuple[JubakoConfig, KVCacheConfig]:
        specs = self.executor.get_kv_cache_specs()
        memory = self.executor.determine_available_memory()
        config = _fit_context(config, specs, memory)
        configs = get_kv_cache_configs(config, specs, memory)
        self.executor.initialize_from_config(configs)
        return config, generate_scheduler_kv_cache_config(configs)

    def _describe(
        self, checkpoint: Checkpoint, kv_cache_config: KVCacheConfig, seconds: dict[str, float]
    ) -> EngineCoreReady:
        model, scheduler = self.config.model_config, self.config.scheduler_config
        return EngineCoreReady(
            version=__version__,
            model=model.model or checkpoint.name,
            architecture=model.architecture,
            dtype=model.dtype,
            device=self.config.device_config.device,
            max_model_len=model.context_length,
            vocab_size=model.vocab_size,
            block_sizes=[g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups],
            num_gpu_blocks=kv_cache_config.num_blocks,
            kv_cache_tokens=get_kv_cache_capacity_tokens(self.config, kv_cache_config),
            enable_prefix_caching=bool(self.config.cache_config.enable_prefix_caching),
            max_num_seqs=scheduler.seq_limit,
            max_num_batched_tokens=scheduler.token_budget,
            scheduling_policy=scheduler.scheduling_policy,
            startup_seconds=seconds,
        )

    # -- requests -----------------------------------------------------------------------------

    def prepare(self, request: EngineCoreRequest) -> Request | Refusal:
        """Everything about a new request that needs no scheduler, block hashes above all.

        Never raises: what is wrong with a request is its sender's business. Thread-safe.
        """
        try:
            return self._make_request(request)
        except Exception as error:
            return self._refusal(request.request_id, request.client_index, error)

    def _make_request(self, request: EngineCoreRequest) -> Request:
        self._check(request)
        result = Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,
            request.pooling_params,
            eos_token_id=request.eos_token_id,
            arrival_time=request.arrival_time,
            client_index=request.client_index,
            mm_features=request.mm_features,
            prompt_embeds=request.prompt_embeds,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
            resumable=request.resumable,
        )
        if self.scheduler.block_hasher is not None:
            result.attach_block_hasher(self.scheduler.block_hasher, self.scheduler.hash_block_size)
        return result

    def _check(self, request: EngineCoreRequest) -> None:
        """Refuse what would stop a step, and with it everybody's requests."""
        for name in ("pooling_params", "mm_features", "prompt_embeds", "lora_request"):
            if getattr(request, name) is not None:
                raise NotImplementedFeatureError(f"{name} is not built; leave it out.", name)
        ids = request.prompt_token_ids
        if not ids:
            raise ValidationError("The prompt is empty.", "prompt")
        limit = self.ready.vocab_size
        if min(ids) < 0 or max(ids) >= limit:
            raise ValidationError(
                f"Token ids must be 0 to {limit - 1}; the prompt has {min(ids)} to {max(ids)}.",
                "prompt",
            )
        longest = self.ready.max_model_len - 1
        if len(ids) > longest:
            raise ValidationError(
                f"The prompt has {len(ids)} tokens, but at most {longest} fit.",
                "prompt",
                code="context_length_exceeded",
            )

    def unreadable(self, request_id: str, client_index: int) -> Refusal:
        """The answer to a request of which no more than this could be read. Thread-safe."""
        return Refusal(request_id, client_index, "The request cannot be read.")

    def _refusal(self, request_id: str, client_index: int, error: Exception) -> Refusal:
        message = "The engine failed to take the request."
        if isinstance(error, JubakoError):
            message = error.message
        else:
            logger.error("Request %s is refused", request_id, exc_info=error)
        return Refusal(request_id, client_index, message)

    def add(self, item: Request | Refusal) -> None:
        """Queue what `prepare` made; an error ends this request alone."""
        if isinstance(item, Refusal):
            self._pending.append(item)
            return
        try:
            self.scheduler.add_request(item)
        except Exception as error:
            self._pending.append(self._refusal(item.request_id, item.client_index, error))

    def add_request(self, request: EngineCoreRequest) -> None:
        """Prepare and queue a request."""
        self.add(self.prepare(request))

    def refuse(self, item: Request | Refusal, message: str) -> None:
        """Answer a request with an error instead of queueing it."""
        if isinstance(item, Request):
            item = Refusal(item.request_id, item.client_index, message)
        self._pending.append(item)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without a further output; unknown and finished ids are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def abort_soon(self, request_ids: list[str]) -> None:
        """Abort before the outputs of the running step are looked at. Thread-safe."""
        self._aborts.put(request_ids)

    def _drain_aborts(self) -> None:
        while not self._aborts.empty():
            self.abort_requests(self._aborts.get())

    # -- steps --------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.get_num_unfinished_requests())

    def has_work(self) -> bool:
        """Whether a step would do anything, if only to tell workers whom to forget."""
        return bool(self._pending) or self.scheduler.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One step: outputs by front end, and whether the model ran.

        Any error raised here leaves the core unusable.
        """
        if not self.scheduler.has_requests():
            return self._with_refusals({}), False
        scheduled = self.scheduler.schedule()
        future = cast(
            "Future[ModelRunnerOutput | None]",
            self.executor.execute_model(scheduled, non_block=True),
        )
        grammar = None
        if scheduled.has_structured_output_requests:
            grammar = self.scheduler.get_grammar_bitmask(scheduled)
        result = future.result()
        if result is None:
            result = cast(ModelRunnerOutput, self.executor.sample_tokens(grammar))
        # Aborts that came meanwhile must not be answered with tokens.
        self._drain_aborts()
        outputs = self.scheduler.update_from_output(scheduled, result)
        return self._with_refusals(outputs), scheduled.total_num_scheduled_tokens > 0

    def _with_refusals(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        for refusal in self._pending:
            message = outputs.setdefault(refusal.client_index, EngineCoreOutputs())
            message.outputs.append(refusal.output)
        self._pending.clear()
        return outputs

    # -- utilities ----------------------------------------------------------------------------

    def check_health(self) -> bool:
        """True if the executor can work; raises if it cannot."""
        self.executor.check_health()
        return True

    def get_request_counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return self.scheduler.get_request_counts()

    def get_supported_tasks(self) -> list[str]:
        """What the model can be used for."""
        return list(self.ready.supported_tasks)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all KV that no request holds; False, and nothing changed, if some is held."""
        return self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)

    def shutdown(self) -> None:
        """Free what scheduler and workers hold."""
        self.scheduler.shutdown()
        self.executor.shutdown()
        gc.unfreeze()


def _fit_context(config: JubakoConfig, specs: Any, memory: list[int]) -> JubakoConfig:
    """Shorten a context that nobody asked for to what the memory holds."""
    model = config.model_config
    if model.original_max_model_len != -1:
        return config
    fitted = fit_max_model_len(config, specs, memory)
    if fitted < model.context_length:
        logger.warning(
            "max_model_len is %d instead of the model's %d: no more fits into the memory for KV.",
            fitted,
            model.context_length,
        )
    return config.replace(model_config={"max_model_len": fitted})
