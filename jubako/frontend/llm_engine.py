"""How does a program that blocks drive an engine: add requests, step, read outputs?"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jubako.checkpoint.info import open_checkpoint
from jubako.config import JubakoConfig
from jubako.engine.client import InprocClient, SyncMPClient
from jubako.engine.messages import EngineCoreReady
from jubako.errors import EngineDeadError, ValidationError
from jubako.frontend.input_processor import InputProcessor, Prompt, assign_request_id
from jubako.frontend.output_processor import OutputProcessor
from jubako.frontend.startup import runs_torch, start_core
from jubako.frontend.stats import IterationStats, StatLogger, TotalsLogger
from jubako.frontend.tokenizer import load_tokenizer
from jubako.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from jubako.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """An engine and its front end, without asyncio.

    With `multiprocess` the core runs in a process of its own, and this one never loads PyTorch: the
    tokeniser is read while the core starts. Otherwise `step` runs the model in the calling thread.
    Not thread-safe.
    """

    def __init__(self, config: JubakoConfig, *, multiprocess: bool = False) -> None:
        self.client: InprocClient | SyncMPClient
        self.tokenizer: Tokenizer
        if multiprocess:
            client = SyncMPClient(preload=runs_torch(config))
            self.tokenizer = start_core(client, config, "llm")
            self.client = client
        else:
            self.client, self.tokenizer = _start_inproc(config)
        self.config = self.client.config
        self._log_stats = not self.config.observability_config.disable_log_stats
        self._totals = TotalsLogger()
        self.stat_loggers: list[StatLogger] = [self._totals] if self._log_stats else []
        self._inputs = InputProcessor(self.config, self.ready, self.tokenizer)
        self._outputs = OutputProcessor(
            self.tokenizer,
            stream_interval=self.config.scheduler_config.stream_interval,
        )

    @property
    def ready(self) -> EngineCoreReady:
        """What the core decided at start-up."""
        return self.client.ready

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> str:
        """Queue a request; returns its internal id, which is unique even if `request_id` is not.

        Raises `ValidationError` for a bad request, which changes nothing.
        """
        request, text, encoder_text = self._inputs.process_inputs(
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
        )
        internal_id = assign_request_id(request)
        children = self._outputs.add_request(request, text, encoder_prompt=encoder_text)
        try:
            for child in children:
                self.client.add_request(child)
        except BaseException:
            self.client.abort_requests(self._outputs.abort_requests([internal_id], internal=True))
            raise
        return internal_id

    def encode_pair(
        self, first: str, second: str, truncate_prompt_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """See `InputProcessor.encode_pair`."""
        return self._inputs.encode_pair(first, second, truncate_prompt_tokens)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End all requests that the caller gave these ids; unknown ones are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.client.abort_requests(self._outputs.abort_requests(ids, internal=False))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to wait for."""
        return self._outputs.has_unfinished_requests()

    @property
    def num_unfinished_requests(self) -> int:
        """Open requests; each of `n` answers counts."""
        return self._outputs.num_unfinished_requests

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """One step of the core, or its next outputs; may be none for any request.

        Raises `EngineDeadError` if the core has ended; then no request is open any more.
        """
        if not self._outputs.has_unfinished_requests():
            return []
        try:
            outputs = self.client.get_output()
        except BaseException as error:
            if self.client.dead_error is not None:
                self._outputs.propagate_error(
                    error if isinstance(error, Exception) else EngineDeadError()
                )
            raise
        iteration = IterationStats() if self._log_stats else None
        processed = self._outputs.process_outputs(outputs.outputs, outputs.timestamp, iteration)
        if processed.reqs_to_abort:
            self.client.abort_requests(processed.reqs_to_abort)
        for stat_logger in self.stat_loggers:
            stat_logger.record(outputs.scheduler_stats, iteration)
        return processed.request_outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if a request holds blocks."""
        return bool(self.client.call_utility("reset_prefix_cache"))

    def get_metrics(self) -> dict[str, Any]:
        """Totals since the start; see `TotalsLogger`."""
        if not self._log_stats:
            raise ValidationError(
                "There are no metrics: the engine runs with disable_log_stats.",
                "disable_log_stats",
            )
        return self._totals.totals()

    def shutdown(self) -> None:
        """End the core; open requests are lost. Calling it again does nothing."""
        self.client.shutdown()


def _start_inproc(config: JubakoConfig) -> tuple[InprocClient, Tokenizer]:
    checkpoint = open_checkpoint(config.model_config.model)
    # The tokeniser is read while weights are: both leave Python's lock for most of the time.
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        tokenizer = pool.submit(load_tokenizer, checkpoint, config.model_config.tokenizer)
        client = InprocClient(config, checkpoint, "llm")
        try:
            return client, tokenizer.result()
        except BaseException:
            client.shutdown()
            raise
