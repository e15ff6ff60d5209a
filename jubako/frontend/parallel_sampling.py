"""How does one request with `n` answers run as `n` requests, and become one again?"""

from __future__ import annotations

from jubako.engine.messages import EngineCoreRequest
from jubako.outputs import CompletionOutput, PositionLogprobs
from jubako.sampling_params import RequestOutputKind, SamplingParams


class ParentRequest:
    """A request with `n` > 1. Its children share the prompt through the prefix cache only.

    Child `i` has its own seed, `seed + i`, if the request has one. The prompt's logprobs are
    computed once, for child 0.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None
        self._request = request
        self._params = request.sampling_params
        self.request_id = request.request_id
        self.n = self._params.n
        self.open_children = {self._child_id(i) for i in range(self.n)}
        self._final_only = self._params.output_kind is RequestOutputKind.FINAL_ONLY
        self._finished: dict[int, CompletionOutput] = {}
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.num_cached_tokens: int | None = None
        self.max_num_generation_tokens = 0

    def _child_id(self, index: int) -> str:
        return f"{index}_{self.request_id}"

    def child(self, index: int) -> EngineCoreRequest:
        """The request of answer `index`."""
        request = self._request
        return EngineCoreRequest(
            request_id=self._child_id(index),
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
            sampling_params=self._child_params(index),
            pooling_params=None,
            eos_token_id=request.eos_token_id,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            data_parallel_rank=request.data_parallel_rank,
            prompt_embeds=request.prompt_embeds,
            client_index=request.client_index,
            priority=request.priority,
            trace_headers=request.trace_headers,
            external_req_id=request.external_req_id,
        )

    def _child_params(self, index: int) -> SamplingParams:
        params = self._params
        # Seeds count modulo 2^64; -1 would mean none.
        seed = None if params.seed is None else (params.seed + index) % 2**64
        if index == 0 or params.prompt_logprobs is None:
            return params.clone(n=1, seed=seed)
        return params.clone(n=1, seed=seed, prompt_logprobs=None, skip_reading_prefix_cache=False)

    def note_cached_tokens(self, count: int) -> int:
        """Take a child's prefix hits into account; the least of all, since children hit each other.

        Returns that number.
        """
        known = self.num_cached_tokens
        self.num_cached_tokens = count if known is None else min(known, count)
        return self.num_cached_tokens

    def close_child(self, child_id: str, num_generation_tokens: int) -> None:
        """A child has ended."""
        self.open_children.discard(child_id)
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_generation_tokens)

    @property
    def finished(self) -> bool:
        """Whether no child is open."""
        return not self.open_children

    def outputs_for(self, completion: CompletionOutput) -> list[CompletionOutput]:
        """What to emit now that a child has `completion`: it, or all answers at the end."""
        if not self._final_only:
            return [completion]
        if completion.finished():
            self._finished[completion.index] = completion
        if not self.finished:
            return []
        return [self._finished[i] for i in sorted(self._finished)]
