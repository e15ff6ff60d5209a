"""How do coroutines share an engine: each reads its own outputs, one task reads the core's?"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from jubako.config import JubakoConfig
from jubako.engine.client import AsyncMPClient
from jubako.engine.messages import EngineCoreOutputs, EngineCoreReady
from jubako.engine.utility import UtilityTimeoutError
from jubako.errors import EngineDeadError, EngineGenerateError, JubakoError, ValidationError
from jubako.frontend.input_processor import (
    InputProcessor,
    ProcessedInput,
    Prompt,
    assign_request_id,
)
from jubako.frontend.output_collector import Output, RequestOutputCollector
from jubako.frontend.output_processor import OutputProcessor
from jubako.frontend.startup import runs_torch, start_core
from jubako.frontend.stats import IterationStats, StatLogger, TotalsLogger
from jubako.frontend.tokenizer import LONG_TEXT
from jubako.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from jubako.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Encoded = TypeVar("Encoded")

OUTPUT_SLICE = 128
"""Outputs processed before other coroutines get a turn."""

PauseMode = Literal["abort", "wait", "keep"]

HEALTH_TIMEOUT = 30.0
"""Seconds in which a living core answers; longer than a step should take."""


class AsyncLLM:
    """An engine for many coroutines of one event loop; the core runs in a process of its own.

    Construction blocks until the core is ready, and may take place in any thread: the loop is that
    of the first `generate`. Options are those of `JubakoConfig`. Call `shutdown` at the end.
    """

    def __init__(
        self, model: str | None = None, *, config: JubakoConfig | None = None, **options: Any
    ) -> None:
        if config is None:
            config = JubakoConfig.from_options({"model": model, **options})
        self._client = AsyncMPClient(preload=runs_torch(config))
        self.tokenizer: Tokenizer = start_core(self._client, config, "server")
        self.config = self._client.config
        self._log_stats = not self.config.observability_config.disable_log_stats
        self._totals = TotalsLogger()
        self.stat_loggers: list[StatLogger] = [self._totals] if self._log_stats else []
        self._inputs = InputProcessor(self.config, self.ready, self.tokenizer)
        self._outputs = OutputProcessor(
            self.tokenizer, stream_interval=self.config.scheduler_config.stream_interval
        )
        # One thread, so that requests keep their order; the tokeniser uses several itself.
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._request_ids = itertools.count()
        self._handler: asyncio.Task[None] | None = None
        self._handler_failed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._pause: _Pause | None = None
        self._is_frozen = False
        """Whether the core was told to schedule nothing."""

    @classmethod
    def from_config(cls, config: JubakoConfig) -> AsyncLLM:
        """An engine with the given configuration."""
        return cls(config=config)

    # -- state --------------------------------------------------------------------------------

    @property
    def ready(self) -> EngineCoreReady:
        """What the core decided at start-up."""
        return self._client.ready

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that every request gets from now on; None while the engine works."""
        if self._handler_failed:
            return EngineDeadError()
        error = self._client.dead_error
        return None if error is None else EngineDeadError(error.message)

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""
        return self.dead_error is not None

    @property
    def num_unfinished_requests(self) -> int:
        """Open requests; each of `n` answers counts."""
        return self._outputs.num_unfinished_requests

    @property
    def num_unfinished_tokens(self) -> int:
        """Prompt tokens of the open requests."""
        return self._outputs.num_unfinished_tokens

    # -- requests -----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs, as its `output_kind` says; the last is `finished`.

        Closing the generator, or cancelling the task that reads it, aborts the request. Raises
        `ValidationError` for a bad request, `EngineDeadError` if the engine has ended or ends, and
        `EngineGenerateError` if this request alone failed in the front end; one that fails in the
        core ends with the finish reason "error".
        """
        outputs = self._run(
            prompt,
            sampling_params or SamplingParams(),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
            trace_headers=trace_headers,
        )
        return cast("AsyncGenerator[RequestOutput, None]", outputs)

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool a prompt and yield its one output. Closing and errors are as in `generate`."""
        outputs = self._run(
            prompt,
            pooling_params or PoolingParams(),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
            trace_headers=trace_headers,
        )
        return cast("AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]", outputs)

    async def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """`InputProcessor.encode_prompt` for each; much text is tokenised on a thread."""

        def encode() -> list[list[int]]:
            return [
                self._inputs.encode_prompt(prompt, truncate_prompt_tokens, add_special_tokens)
                for prompt in prompts
            ]

        return await self._encode(encode, sum(len(p) for p in prompts if isinstance(p, str)))

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], truncate_prompt_tokens: int | None = None
    ) -> list[tuple[list[int], int | None]]:
        """`InputProcessor.encode_pair` for each; much text is tokenised on a thread."""

        def encode() -> list[tuple[list[int], int | None]]:
            return [self._inputs.encode_pair(a, b, truncate_prompt_tokens) for a, b in pairs]

        return await self._encode(encode, sum(len(a) + len(b) for a, b in pairs))

    async def _encode(self, encode: Callable[[], Encoded], characters: int) -> Encoded:
        if characters <= LONG_TEXT:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._encoding, encode)

    async def _run(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        **options: Any,
    ) -> AsyncGenerator[Output, None]:
        internal_id: str | None = None
        finished = False
        try:
            internal_id, collector = await self._add_request(
                prompt,
                params,
                request_id or f"request-{next(self._request_ids)}",
                **options,
            )
            while not finished:
                # What is there is taken without a switch to other tasks.
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        except JubakoError:
            raise
        except Exception as error:
            logger.exception("Request %s failed", request_id)
            raise EngineGenerateError("The request failed inside the engine.") from error
        finally:
            if internal_id is not None and not finished:
                self._abort([internal_id], internal=True)

    async def _add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        **options: Any,
    ) -> tuple[str, RequestOutputCollector]:
        self._ensure_handler()
        process = functools.partial(
            self._inputs.process_inputs, request_id, prompt, params, **options
        )
        processed: ProcessedInput
        if self._inputs.takes_long(prompt, params):
            loop = asyncio.get_running_loop()
            processed = await loop.run_in_executor(self._encoding, process)
            self._raise_if_dead()
        else:
            processed = process()
        await self._wait_while_closed()
        internal_id = assign_request_id(processed.request)
        collector = RequestOutputCollector(params.output_kind)
        children = self._outputs.add_request(
            processed.request, processed.prompt, collector, processed.encoder_prompt
        )
        self._idle.clear()
        try:
            for child in children:
                self._client.add_request(child)
        except BaseException:
            self._abort([internal_id], internal=True)
            raise
        return internal_id, collector

    async def _wait_while_closed(self) -> None:
        """Wait while a pause lets no request in.

        Nothing else may run between the return and the registering of the request.
        """
        while self._pause is not None and self._pause.is_closed:
            await self._pause.ended.wait()
            self._raise_if_dead()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End all requests that the caller gave these ids, each with a last output."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        self._abort(ids, internal=False)

    def _abort(self, request_ids: Iterable[str], *, internal: bool) -> None:
        stats = IterationStats() if self._log_stats else None
        aborted = self._outputs.abort_requests(
            request_ids, internal=internal, iteration_stats=stats
        )
        self._client.abort_requests(aborted)
        if aborted:
            for stat_logger in self.stat_loggers:
                stat_logger.record(None, stats)
        self._note_idle()

    # -- outputs ------------------------------------------------------------------------------

    def _raise_if_dead(self) -> None:
        error = self.dead_error
        if error is not None:
            raise error

    def _ensure_handler(self) -> None:
        self._raise_if_dead()
        if self._handler is None or self._handler.done():
            loop = asyncio.get_running_loop()
            self._handler = loop.create_task(self._handle_outputs(), name="jubako-outputs")

    async def _handle_outputs(self) -> None:
        try:
            while True:
                outputs = await self._client.get_output()
                await self._process(outputs)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("Processing outputs failed")
                error = EngineDeadError()
            self._handler_failed = True
            self._end_pause()
            self._outputs.propagate_error(error)
            self._note_idle()

    async def _process(self, outputs: EngineCoreOutputs) -> None:
        iteration = IterationStats() if self._log_stats else None
        items = outputs.outputs
        for start in range(0, len(items), OUTPUT_SLICE):
            part = items[start : start + OUTPUT_SLICE]
            processed = self._outputs.process_outputs(part, outputs.timestamp, iteration)
            self._client.abort_requests(processed.reqs_to_abort)
            await asyncio.sleep(0)
        for stat_logger in self.stat_loggers:
            stat_logger.record(outputs.scheduler_stats, iteration)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._outputs.has_unfinished_requests():
            self._idle.set()

    # -- control ------------------------------------------------------------------------------

    async def check_health(self, timeout: float = HEALTH_TIMEOUT) -> None:
        """Return if the core's loop answers within `timeout` seconds, else `EngineDeadError`."""
        self._ensure_handler()
        try:
            await self._client.call_utility("check_health", timeout=timeout)
        except UtilityTimeoutError:
            raise EngineDeadError(f"The engine core did not answer within {timeout:g} s.") from None

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; False if a request holds blocks.

        With `reset_running_requests` those requests start over, and their outputs go on unchanged.
        """
        self._ensure_handler()
        done = await self._client.call_utility(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )
        return bool(done)

    # -- pauses -------------------------------------------------------------------------------

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop generating until `resume_generation`, for instance to change the weights.

        "abort" ends the open requests, each with a last output; "wait" lets them finish; in both,
        new requests wait until the pause is over. "keep" stops the core between two steps and
        leaves all requests where they are; new ones join them. Then the caches of prefixes, media
        and encoder outputs are cleared, if `clear_cache`; requests that are kept are computed again
        from their tokens, and their outputs go on unchanged.

        Returns when no request runs, or when the pause was ended meanwhile. Called again, the last
        mode holds. Raises `ValidationError` for an unknown mode, and `JubakoError` if the prefix
        cache cannot be cleared because transfers hold some of it; the pause holds then too.
        """
        if mode not in ("abort", "wait", "keep"):
            raise ValidationError(f"mode must be abort, wait or keep, got {mode!r}.", "mode", mode)
        self._ensure_handler()
        earlier, pause = self._pause, _Pause(is_closed=mode != "keep")
        self._pause = pause
        if earlier is not None:
            # Who waits for that one looks again, and finds this one.
            earlier.ended.set()
        if mode == "keep":
            await self._freeze(True)
        elif mode == "abort":
            self._abort(self._outputs.unfinished_request_ids, internal=True)
        elif self._is_frozen:
            # What is frozen does not finish.
            await self._freeze(False)
        if mode == "wait":
            await self._wait_until_idle(pause)
        if clear_cache and self._pause is pause:
            await self._clear_caches()

    async def resume_generation(self) -> None:
        """Go on; does nothing if there is no pause."""
        self._end_pause()
        if self._is_frozen:
            await self._freeze(False)

    async def is_paused(self) -> bool:
        """Whether `pause_generation` was called and `resume_generation` was not since."""
        return self._pause is not None

    def _end_pause(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.ended.set()

    async def _freeze(self, frozen: bool) -> None:
        self._is_frozen = frozen
        await self._client.call_utility("pause_scheduler" if frozen else "resume_scheduler")

    async def _wait_until_idle(self, pause: _Pause) -> None:
        """Wait until no request is open or `pause` is over."""
        waits = [asyncio.ensure_future(e.wait()) for e in (self._idle, pause.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._raise_if_dead()

    async def _clear_caches(self) -> None:
        # Requests that are kept start over, or their KV would stay.
        if not await self.reset_prefix_cache(reset_running_requests=True):
            raise JubakoError(
                "The prefix cache was not cleared: transfers hold some of its blocks. Try again "
                "when they are done."
            )
        await self._client.call_utility("reset_mm_cache")
        await self._client.call_utility("reset_encoder_cache")

    async def wait_for_drain(self, timeout: float | None = None) -> bool:
        """Wait until no request is open, at most `timeout` seconds; whether that is so."""
        if not self._outputs.has_unfinished_requests():
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return not self._outputs.has_unfinished_requests()

    def get_metrics(self) -> dict[str, Any]:
        """Totals since the start; empty with `disable_log_stats`."""
        return self._totals.totals() if self._log_stats else {}

    def shutdown(self) -> None:
        """End the core; open requests get `EngineDeadError`. Calling it again does nothing."""
        self._client.shutdown()
        self._end_pause()
        if self._handler is not None and not self._handler.get_loop().is_closed():
            self._handler.cancel()
        self._outputs.propagate_error(EngineDeadError("The engine was shut down."))
        self._encoding.shutdown(wait=False, cancel_futures=True)


class _Pause:
    """A time in which nothing is generated."""

    def __init__(self, *, is_closed: bool) -> None:
        self.is_closed = is_closed
        """Whether new requests are kept out."""
        self.ended = asyncio.Event()
