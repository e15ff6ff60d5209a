"""How do tokens of the core become the outputs that a user reads?

`OutputProcessor` holds the state of every open request of a front end, and has the only loop over
outputs. The core decides about stop tokens and lengths; stop strings are found here, and the
request is then aborted in the core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jubako.engine.encoder_input import encoder_token_ids
from jubako.engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from jubako.frontend.logprobs import LogprobsProcessor, TokenTexts
from jubako.frontend.output_collector import RequestOutputCollector
from jubako.frontend.parallel_sampling import ParentRequest
from jubako.frontend.pooling_state import PoolingState
from jubako.frontend.stats import (
    IterationStats,
    finished_request_stats,
    update_request_stats,
)
from jubako.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestStateStats,
)
from jubako.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.tokenizer import Tokenizer


class ProcessedOutputs(NamedTuple):
    """Outputs of requests without a collector, and ids that the core must abort."""

    request_outputs: list[RequestOutput | PoolingRequestOutput[PoolingOutput]]
    reqs_to_abort: list[str]


class RequestState:
    """One open request, or one child of a request with `n` > 1."""

    __slots__ = (
        "collector",
        "detokenizer",
        "encoder_prompt",
        "encoder_prompt_token_ids",
        "external_req_id",
        "index",
        "logprobs",
        "num_cached_tokens",
        "num_sent",
        "output_kind",
        "params",
        "parent",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "stats",
        "stream_interval",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        texts: TokenTexts | None,
        *,
        collector: RequestOutputCollector | None,
        parent: ParentRequest | None,
        index: int,
        stream_interval: int,
        encoder_prompt: str | None = None,
    ) -> None:
        from jubako.frontend.detokenizer import make_detokenizer

        params = request.sampling_params
        assert params is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.params: SamplingParams = params
        self.output_kind = params.output_kind
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids or []
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_token_ids(request.mm_features)
        self.collector = collector
        self.parent = parent
        self.index = index
        self.stream_interval = stream_interval
        self.num_cached_tokens = 0
        self.num_sent = 0
        """Tokens that were emitted."""
        self.detokenizer = make_detokenizer(tokenizer, self.prompt_token_ids, params)
        wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self.logprobs = (
            LogprobsProcessor(params, self.prompt_token_ids, texts) if wants_logprobs else None
        )
        self.stats = RequestStateStats(arrival_time=request.arrival_time)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens that it may generate."""
        return self.params.max_tokens

    def is_due(self, finished: bool) -> bool:
        """Whether the tokens that are not emitted yet make an output."""
        if finished:
            return True
        if self.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        count = len(self.detokenizer.token_ids)
        if count == self.num_sent:
            return False
        return self.num_sent == 0 or count - self.num_sent >= self.stream_interval

    def make_request_output(
        self, reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """The next output as the output kind asks; None if there is nothing to emit now."""
        finished = reason is not None
        if finished and self.parent is not None:
            self.parent.close_child(self.request_id, self.stats.num_generation_tokens)
        if not self.is_due(finished):
            return None
        completion = self._make_completion(reason, stop_reason)
        completions = [completion]
        num_cached_tokens = self.num_cached_tokens
        if self.parent is not None:
            completions = self.parent.outputs_for(completion)
            num_cached_tokens = self.parent.num_cached_tokens or 0
            finished = self.parent.finished
        prompt_logprobs = self._prompt_logprobs()
        if not completions:
            return None
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=self.stats,
            num_cached_tokens=num_cached_tokens,
            encoder_prompt=self.encoder_prompt,
            encoder_prompt_token_ids=self.encoder_prompt_token_ids,
        )

    def _make_completion(
        self, reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        detokenizer, delta = self.detokenizer, self.output_kind is RequestOutputKind.DELTA
        start = self.num_sent if delta else 0
        token_ids = detokenizer.token_ids
        self.num_sent = len(token_ids)
        logprobs = cumulative = None
        if self.logprobs is not None:
            cumulative = self.logprobs.cumulative_logprob
            if self.logprobs.logprobs is not None:
                logprobs = self.logprobs.logprobs[start : self.num_sent]
        return CompletionOutput(
            index=self.index,
            text=detokenizer.get_next_output_text(reason is not None, delta),
            token_ids=token_ids[start:],
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=None if reason is None else str(reason),
            stop_reason=None if reason is None else stop_reason,
        )

    def _prompt_logprobs(self) -> list | None:  # type: ignore[type-arg]
        if self.logprobs is None:
            known = None
        elif self.output_kind is RequestOutputKind.DELTA:
            return self.logprobs.take_prompt_logprobs()
        else:
            known = self.logprobs.prompt_logprobs
        if self.parent is None:
            return known
        if known is not None:
            self.parent.prompt_logprobs = known
        if self.output_kind is RequestOutputKind.DELTA:
            return None
        return self.parent.prompt_logprobs


class OutputProcessor:
    """The open requests of a front end, and what becomes of the core's outputs for them.

    Not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._stream_interval = stream_interval
        self._states: dict[str, RequestState | PoolingState] = {}
        self._by_external_id: dict[str, list[str]] = {}
        """Caller's id → internal ids of the requests, or children, that it stands for."""
        self._parents: dict[str, ParentRequest] = {}
        self._num_tokens = 0

    # -- counts -------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """Whether any request is open."""
        return bool(self._states)

    @property
    def num_unfinished_requests(self) -> int:
        """Open requests; each of `n` answers counts."""
        return len(self._states)

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Internal ids of the open requests; of each of `n` answers."""
        return list(self._states)

    @property
    def num_unfinished_tokens(self) -> int:
        """Prompt tokens of the open requests."""
        return self._num_tokens

    # -- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        collector: RequestOutputCollector | None = None,
        encoder_prompt: str | None = None,
    ) -> list[EngineCoreRequest]:
        """Open a request; the requests to send to the core, one unless `n` > 1.

        They must be sent after this call, never before: an output could come first. If anything
        fails, nothing is open.
        """
        params = request.sampling_params
        if params is None or params.n == 1:
            self._open(request, prompt, collector, None, 0, encoder_prompt)
            return [request]
        parent = ParentRequest(request)
        children = [parent.child(i) for i in range(parent.n)]
        self._parents[parent.request_id] = parent
        try:
            for index, child in enumerate(children):
                self._open(child, prompt, collector, parent, index, encoder_prompt)
        except BaseException:
            for child in children:
                if child.request_id in self._states:
                    self._close(self._states[child.request_id])
            self._parents.pop(parent.request_id, None)
            raise
        return children

    def _open(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        collector: RequestOutputCollector | None,
        parent: ParentRequest | None,
        index: int,
        encoder_prompt: str | None,
    ) -> None:
        assert request.request_id not in self._states
        state: RequestState | PoolingState
        if request.pooling_params is not None:
            state = PoolingState(request, collector)
        else:
            state = RequestState(
                request,
                prompt,
                self._tokenizer,
                self._texts,
                collector=collector,
                parent=parent,
                index=index,
                stream_interval=self._stream_interval,
                encoder_prompt=encoder_prompt,
            )
        self._states[request.request_id] = state
        self._by_external_id.setdefault(state.external_req_id, []).append(request.request_id)
        self._num_tokens += len(state.prompt_token_ids)

    def _close(self, state: RequestState | PoolingState) -> None:
        del self._states[state.request_id]
        self._num_tokens -= len(state.prompt_token_ids)
        ids = self._by_external_id[state.external_req_id]
        ids.remove(state.request_id)
        if not ids:
            del self._by_external_id[state.external_req_id]
        if state.parent is not None and state.parent.finished:
            self._parents.pop(state.parent.request_id, None)

    def abort_requests(
        self,
        request_ids: Iterable[str],
        *,
        internal: bool,
        iteration_stats: IterationStats | None = None,
    ) -> list[str]:
        """End requests with a last output; the ids that the core must abort.

        With `internal` the ids are those of `assign_request_id`, else the callers', each of which
        stands for all open requests that use it. Unknown ids are ignored.
        """
        aborted: list[str] = []
        for request_id in request_ids:
            if not internal:
                aborted += self._by_external_id.get(request_id, ())
            elif request_id in self._parents:
                aborted += sorted(self._parents[request_id].open_children)
            else:
                aborted.append(request_id)
        aborted = [i for i in dict.fromkeys(aborted) if i in self._states]
        for request_id in aborted:
            state = self._states[request_id]
            output = state.make_request_output(FinishReason.ABORT, None)
            self._close(state)
            if output is not None and state.collector is not None:
                state.collector.put(output)
            if iteration_stats is not None:
                _count_finished(state, FinishReason.ABORT, iteration_stats)
        return aborted

    def propagate_error(self, error: Exception) -> None:
        """End every open request with `error`."""
        states, self._states = self._states, {}
        self._by_external_id.clear()
        self._parents.clear()
        self._num_tokens = 0
        for state in states.values():
            if state.collector is not None:
                state.collector.put(error)

    # -- outputs ------------------------------------------------------------------------------

    def process_outputs(
        self,
        outputs: Sequence[EngineCoreOutput],
        timestamp: float,
        iteration_stats: IterationStats | None = None,
    ) -> ProcessedOutputs:
        """Take over outputs of the core, made at `timestamp` on its monotonic clock.

        Outputs go to their request's collector, or into the result where there is none. Outputs of
        requests that are not open any more are dropped.
        """
        request_outputs: list[RequestOutput | PoolingRequestOutput[PoolingOutput]] = []
        to_abort: list[str] = []
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            reason, stop_reason = self._take_over(state, output, timestamp, iteration_stats)
            request_output = state.make_request_output(reason, stop_reason)
            if request_output is not None:
                if state.collector is not None:
                    state.collector.put(request_output)
                else:
                    request_outputs.append(request_output)
            if reason is not None:
                self._close(state)
                if not output.finished:
                    to_abort.append(state.request_id)
                if iteration_stats is not None:
                    _count_finished(state, reason, iteration_stats)
        return ProcessedOutputs(request_outputs, to_abort)

    def _take_over(
        self,
        state: RequestState | PoolingState,
        output: EngineCoreOutput,
        timestamp: float,
        iteration_stats: IterationStats | None,
    ) -> tuple[FinishReason | None, int | str | None]:
        """Add an output to its request; why the request ends with it, if it does."""
        if isinstance(state, PoolingState):
            return state.take_over(output, timestamp, iteration_stats), None
        stats = state.stats
        if stats.first_token_ts == 0.0 and output.new_token_ids:
            state.num_cached_tokens = output.num_cached_tokens
            if state.parent is not None:
                state.parent.note_cached_tokens(output.num_cached_tokens)
        update_request_stats(stats, output, timestamp, len(state.prompt_token_ids), iteration_stats)
        reason, stop_reason = output.finish_reason, output.stop_reason
        stop = state.detokenizer.update(output.new_token_ids, reason is FinishReason.STOP)
        if state.logprobs is not None:
            state.logprobs.update(output)
        if stop is not None:
            return FinishReason.STOP, stop
        if reason is FinishReason.ERROR and stop_reason is None:
            stop_reason = output.error
        return reason, stop_reason


def _count_finished(
    state: RequestState | PoolingState, reason: FinishReason, iteration_stats: IterationStats
) -> None:
    iteration_stats.finished_requests.append(
        finished_request_stats(
            state.stats,
            reason,
            len(state.prompt_token_ids),
            state.max_tokens,
            state.num_cached_tokens,
        )
    )
    parent = state.parent
    if parent is None:
        iteration_stats.n_params_iter.append(1)
        iteration_stats.max_num_generation_tokens_iter.append(state.stats.num_generation_tokens)
    elif parent.finished:
        iteration_stats.n_params_iter.append(parent.n)
        iteration_stats.max_num_generation_tokens_iter.append(parent.max_num_generation_tokens)
