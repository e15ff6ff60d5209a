"""What happens in one step of the engine, and who takes part in it?

`EngineCore` owns the scheduler and the executor. A step schedules, runs the model, and hands what
came back to the scheduler. Where the executor takes several steps at a time, the next one is
planned while the workers compute. An error that belongs to one request ends that request; an error
of the step itself ends the engine, since nobody knows what the workers hold then.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jubako import __version__
from jubako.config import JubakoConfig
from jubako.engine.encoder_input import check_encoder_input
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
from jubako.scheduler.async_scheduler import AsyncScheduler, OverlappingScheduler
from jubako.scheduler.features import LoRARequest
from jubako.scheduler.model_output import ModelRunnerOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.protocols import ECConnector, KVConnector, StructuredOutputManager
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from jubako.checkpoint.info import Checkpoint
    from jubako.executor.executor import Executor
    from jubako.structured_output.vocabulary import Vocabulary

StepResult = tuple[dict[int, EngineCoreOutputs] | None, bool]
"""Outputs by front end, or None if no step has come back; and whether a model runs or ran."""

_IDLE_DELAY = 0.001
"""Seconds between steps while all requests wait, for a grammar for instance."""

_FIRST_TRANSFER_DELAY = 0.002
_LAST_TRANSFER_DELAY = 0.02
"""Seconds between steps while only transfers are under way."""

_StepFuture = Future[ModelRunnerOutput | None]

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


class _StepInFlight(NamedTuple):
    """A step that the workers have and the scheduler waits for."""

    result: _StepFuture
    scheduled: SchedulerOutput
    executed: _StepFuture
    """Of its first phase, which tells why there is no result."""


class EngineCore:
    """The engine without its surroundings: requests in, tokens out, step by step.

    `config` must be complete (`engine.setup`); the attribute of that name also has what was decided
    here. Connectors, and grammars that are not the engine's own, are handed on to the scheduler.
    `step_fn` is the step that suits the executor; `post_step` belongs after each. Not thread-safe
    but for `prepare` and `abort_soon`.
    """

    def __init__(
        self,
        config: JubakoConfig,
        checkpoint: Checkpoint,
        executor_class: Callable[[JubakoConfig, Checkpoint], Executor] | None = None,
        log_stats: bool = True,
        *,
        structured_output_manager: StructuredOutputManager | None = None,
        connector: KVConnector | None = None,
        ec_connector: ECConnector | None = None,
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
            self.batch_queue: deque[_StepInFlight] | None = None
            """Steps in flight, the newest first; None if there is one step at a time."""
            self.batch_queue_size = self.executor.max_concurrent_batches
            self.step_fn: Callable[[], StepResult] = self.step
            if self.batch_queue_size > 1:
                self.batch_queue = deque()
                self.step_fn = self.step_with_batch_queue
            self.structured_output_manager = structured_output_manager
            if structured_output_manager is None and not config.model_config.pools:
                self.structured_output_manager = _make_grammars(self.config, checkpoint)
            self.scheduler = self._scheduler_class()(
                self.config,
                kv_cache_config,
                structured_output_manager=self.structured_output_manager,
                connector=connector,
                ec_connector=ec_connector,
                log_stats=log_stats,
            )
        except BaseException:
            self.executor.shutdown()
            raise
        self._pending: list[Refusal] = []
        self._transfer_delay = _FIRST_TRANSFER_DELAY
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

    def _scheduler_class(self) -> type[Scheduler]:
        if self.config.scheduler_config.async_scheduling:
            return AsyncScheduler
        return Scheduler if self.batch_queue is None else OverlappingScheduler

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
            supported_tasks=list(model.supported_tasks),
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
        for name in ("prompt_embeds", "lora_request"):
            if getattr(request, name) is not None:
                raise NotImplementedFeatureError(f"{name} is not built; leave it out.", name)
        check_encoder_input(self.config.encoder_config, self.ready.vocab_size, request.mm_features)
        ids = request.prompt_token_ids
        if not ids:
            raise ValidationError("The prompt is empty.", "prompt")
        limit = self.ready.vocab_size
        if min(ids) < 0 or max(ids) >= limit:
            raise ValidationError(
                f"Token ids must be 0 to {limit - 1}; the prompt has {min(ids)} to {max(ids)}.",
                "prompt",
            )
        pools = request.pooling_params is not None
        if pools != self.config.model_config.pools:
            raise ValidationError(
                f"The model {'writes text' if pools else 'pools'}; it cannot be asked for anything "
                "else.",
                code="unsupported_task",
            )
        longest = self.ready.max_model_len - (not pools)
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
        return bool(self._pending or self.batch_queue) or self.scheduler.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One step, from its plan to its outputs by front end; and whether the model ran.

        Any error raised here leaves the core unusable.
        """
        if not self.scheduler.has_requests():
            return self._with_refusals({}), False
        scheduled = self.scheduler.schedule()
        future = cast(_StepFuture, self.executor.execute_model(scheduled, non_block=True))
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

    def step_with_batch_queue(self) -> StepResult:
        """Give the workers another step if they take one, else collect the oldest.

        Filling the queue goes before draining it. A step whose grammar masks need tokens that are
        in flight begins, and is sampled when they have come. Any error raised here leaves the core
        unusable.
        """
        queue = self.batch_queue
        assert queue is not None
        deferred: _StepInFlight | None = None
        model_runs = False
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            executed = cast(_StepFuture, self.executor.execute_model(scheduled, non_block=True))
            step = _StepInFlight(executed, scheduled, executed)
            model_runs = scheduled.total_num_scheduled_tokens > 0
            if model_runs and scheduled.pending_structured_output_tokens:
                deferred = step
            else:
                queue.appendleft(self._sample(step) if model_runs else step)
                is_full = len(queue) >= self.batch_queue_size
                if model_runs and not is_full and not queue[-1].result.done():
                    return (self._with_refusals({}) if self._pending else None), True
        outputs: dict[int, EngineCoreOutputs] | None = None
        if queue:
            outputs, model_ran = self._collect_step(queue.pop())
            model_runs = model_runs or model_ran
        if deferred is not None:
            queue.appendleft(self._sample_deferred(deferred))
        if self._pending:
            outputs = self._with_refusals(outputs or {})
        return outputs, model_runs

    def _sample(self, step: _StepInFlight) -> _StepInFlight:
        """Hand out the second phase of a step, which then has its result."""
        grammar = None
        if step.scheduled.has_structured_output_requests:
            grammar = self.scheduler.get_grammar_bitmask(step.scheduled)
        result = cast(_StepFuture, self.executor.sample_tokens(grammar, non_block=True))
        return step._replace(result=result)

    def _sample_deferred(self, step: _StepInFlight) -> _StepInFlight:
        """Sample a step before which all tokens are known now."""
        if step.scheduled.scheduled_spec_decode_tokens:
            drafts = self.executor.take_draft_token_ids()
            if drafts is not None and isinstance(self.scheduler, AsyncScheduler):
                self.scheduler.update_draft_token_ids_in_output(drafts, step.scheduled)
        return self._sample(step)

    def _collect_step(self, step: _StepInFlight) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Wait for a step; its outputs, and whether the model ran."""
        result = step.result.result()
        if result is None:
            # The first phase failed, and so there was nothing to sample.
            step.executed.result()
            raise RuntimeError("A step was sampled that had not been executed.")
        # Aborts that came meanwhile must not be answered with tokens.
        self._drain_aborts()
        outputs = self.scheduler.update_from_output(step.scheduled, result)
        return outputs, step.scheduled.total_num_scheduled_tokens > 0

    def post_step(self, model_ran: bool) -> None:
        """Fetch the drafts of a step that ran, for the next.

        Where the next has been planned already, the workers keep them.
        """
        if not model_ran or self.config.scheduler_config.async_scheduling:
            return
        drafts = self.executor.take_draft_token_ids()
        if drafts is not None:
            self.scheduler.update_draft_token_ids(drafts)

    def idle_delay(self, model_ran: bool) -> float:
        """Seconds to wait before the next step, unless something arrives; 0: none.

        After a step in which everything waited for something outside. Reports of transfers are
        asked for less and less often.
        """
        scheduler = self.scheduler
        computing = any(s.scheduled.total_num_scheduled_tokens for s in self.batch_queue or ())
        if model_ran or computing or self._pending:
            self._transfer_delay = _FIRST_TRANSFER_DELAY
            return 0.0
        if not scheduler.has_requests() or scheduler.has_finished_requests():
            return 0.0
        if not scheduler.has_transfers():
            return _IDLE_DELAY
        delay = self._transfer_delay
        self._transfer_delay = min(2 * delay, _LAST_TRANSFER_DELAY)
        return delay

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

    def reset_mm_cache(self) -> None:
        """Forget received media."""
        self.executor.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Forget all encoder outputs."""
        self.scheduler.reset_encoder_cache()
        self.executor.reset_encoder_cache()

    def pause_scheduler(self) -> None:
        """Begin no step until `resume_scheduler`. What is in flight is still collected."""
        self.scheduler.pause()

    def resume_scheduler(self) -> None:
        """Go on where `pause_scheduler` stopped."""
        self.scheduler.resume()

    def is_scheduler_paused(self) -> bool:
        """Whether the scheduler is paused."""
        return self.scheduler.is_paused

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`."""
        self.executor.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again."""
        self.executor.wake_up(tags)

    def profile(self, start: bool = True) -> None:
        """Start or end profiling."""
        self.executor.profile(start)

    def execute_dummy_batch(self) -> None:
        """Run a step on made-up tokens."""
        self.executor.execute_dummy_batch()

    def list_loras(self) -> set[int]:
        """Ids of loaded adapters."""
        return self.executor.list_loras()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; whether all workers did."""
        return self.executor.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; whether all workers did."""
        return self.executor.remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded; whether all workers do."""
        return self.executor.pin_lora(lora_id)

    def shutdown(self) -> None:
        """Free what scheduler and workers hold."""
        stop_grammars = getattr(self.structured_output_manager, "shutdown", None)
        if stop_grammars is not None:
            stop_grammars()
        self.scheduler.shutdown()
        self.executor.shutdown()
        gc.unfreeze()


def _make_grammars(config: JubakoConfig, checkpoint: Checkpoint) -> StructuredOutputManager:
    """Grammars for the model's vocabulary, which is read when the first one is wanted."""
    from jubako.structured_output.manager import StructuredOutputManager

    model = config.model_config

    def read() -> Vocabulary:
        from jubako.structured_output.vocabulary import read_vocabulary

        return read_vocabulary(checkpoint, model.tokenizer, model.vocab_size)

    return StructuredOutputManager(read, model.vocab_size, model.eos_token_ids)


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
