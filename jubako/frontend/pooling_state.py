"""What does the front end remember of an open pooling request, and what does it become?"""

from __future__ import annotations

import numpy as np

from jubako.engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from jubako.frontend.output_collector import RequestOutputCollector
from jubako.frontend.stats import IterationStats, update_request_stats
from jubako.outputs import PoolingOutput, PoolingRequestOutput, RequestStateStats


class PoolingState:
    """One open pooling request. It has one output, which ends it."""

    parent = None

    def __init__(
        self, request: EngineCoreRequest, collector: RequestOutputCollector | None
    ) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.prompt_token_ids = request.prompt_token_ids or []
        self.collector = collector
        self.num_cached_tokens = 0
        self.max_tokens: int | None = None
        self.stats = RequestStateStats(arrival_time=request.arrival_time)
        self._data: np.ndarray | None = None
        self._error: str | None = None

    def take_over(
        self, output: EngineCoreOutput, timestamp: float, iteration_stats: IterationStats | None
    ) -> FinishReason | None:
        """Add the core's output; why the request ends with it, if it does."""
        update_request_stats(
            self.stats, output, timestamp, len(self.prompt_token_ids), iteration_stats
        )
        self.num_cached_tokens = output.num_cached_tokens
        if output.pooling_output is not None:
            self._data = output.pooling_output
            self._count(output, timestamp, iteration_stats)
        self._error = output.error
        return output.finish_reason

    def _count(
        self, output: EngineCoreOutput, timestamp: float, iteration: IterationStats | None
    ) -> None:
        """The prompt has been computed, as a request for text has when its first token comes."""
        self.stats.first_token_ts = self.stats.last_token_ts = timestamp
        if iteration is not None:
            external = output.num_external_computed_tokens
            iteration.num_prompt_tokens += len(self.prompt_token_ids)
            iteration.num_external_prompt_tokens += external
            iteration.num_cached_prompt_tokens += output.num_cached_tokens - external

    def make_request_output(
        self, reason: FinishReason | None, stop_reason: int | str | None
    ) -> PoolingRequestOutput[PoolingOutput] | None:
        """The output at the end; None before."""
        if reason is None:
            return None
        data = self._data if reason in (FinishReason.STOP, FinishReason.LENGTH) else None
        if data is None and reason is not FinishReason.ABORT:
            reason = FinishReason.ERROR
        return PoolingRequestOutput(
            request_id=self.external_req_id,
            outputs=None if data is None else PoolingOutput(data=data),
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached_tokens,
            finish_reason="stop" if data is not None else str(reason),
            error=self._error,
            metrics=self.stats,
        )
