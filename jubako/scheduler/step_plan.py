"""What has been decided for the step that is being scheduled, and how does it look as records?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from jubako.kv_cache import KVCacheManager
from jubako.scheduler.output import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from jubako.scheduler.request import Request
from jubako.scheduler.steady import SteadyDecodes


@dataclass(slots=True)
class StepPlan:
    """The step so far. Dicts are by request id; the order of `num_scheduled` is the batch's."""

    token_budget: int
    encoder_budget: int
    timestamp: float
    share_of: dict[int, int | None] = field(default_factory=dict)
    """Fair share of prompt tokens, by the priority of the request that asks; None: no limit."""
    draft_share: int | None = None
    """Most drafts a request may bring, when all of them do not fit."""
    position: int = 0
    """How far phase 1 has come in the list of running requests."""
    num_scheduled: dict[str, int] = field(default_factory=dict)
    steady: SteadyDecodes | None = None
    """If there are any, they get one token each and come before `running` in the batch."""
    running: list[Request] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    new_block_ids: dict[str, BlockIds] = field(default_factory=dict)
    """Only of requests that ran before and got blocks."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    given_drafts: dict[str, list[int]] = field(default_factory=dict)
    """All drafts that a request brought, to give them back if it is taken out again."""
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    shortened: dict[str, int] = field(default_factory=dict)
    """Requests that a fair share cut, with the tokens that they would have taken."""
    preempted: set[str] = field(default_factory=set)
    external_inputs: dict[str, list[int]] = field(default_factory=dict)
    """Media items whose encoder outputs the step loads."""
    loading_outputs: set[str] = field(default_factory=set)
    """Identifiers of outputs that the step may load: also of chunks that did not fit."""
    loading: list[Request] = field(default_factory=list)
    """Requests whose KV begins to be loaded."""

    def add_block_ids(self, request_id: str, block_ids: BlockIds | None) -> None:
        """Note blocks for a request that ran before, behind those already noted."""
        if block_ids is None:
            return
        earlier = self.new_block_ids.get(request_id)
        if earlier is not None:
            block_ids = tuple(old + new for old, new in zip(earlier, block_ids))
        self.new_block_ids[request_id] = block_ids

    def remove(self, request: Request) -> None:
        """Take a request out again, if it is in the step."""
        request_id = request.request_id
        if request.is_steady:
            self.spread_steady()
        for planned in (self.running, self.new, self.resumed):
            if request in planned:
                planned.remove(request)
        self.token_budget += self.num_scheduled.pop(request_id, 0)
        self.new_block_ids.pop(request_id, None)
        self.drafts.pop(request_id, None)
        self.given_drafts.pop(request_id, None)
        self.shortened.pop(request_id, None)

    def spread_steady(self) -> None:
        """List the steady decodes among the other running requests."""
        if self.steady is not None:
            self.running = self.steady.requests + self.running
            self.steady = None

    def to_output(
        self,
        kv_cache_manager: KVCacheManager,
        previous_step: Collection[str],
        send_new_token_ids: bool,
    ) -> SchedulerOutput:
        """The records of this step; request counters must still be those from before it."""
        return SchedulerOutput(
            scheduled_new_reqs=[_new_request_data(r, kv_cache_manager) for r in self.new],
            scheduled_cached_reqs=self._cached_request_data(
                kv_cache_manager, previous_step, send_new_token_ids
            ),
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=sum(self.num_scheduled.values()),
            scheduled_spec_decode_tokens=self.drafts,
            scheduled_encoder_inputs=self.encoder_inputs,
            preempted_req_ids=self.preempted or None,
        )

    def _cached_request_data(
        self,
        kv_cache_manager: KVCacheManager,
        previous_step: Collection[str],
        send_new_token_ids: bool,
    ) -> CachedRequestData:
        requests = self.running + self.resumed if self.resumed else self.running
        req_ids = [request.request_id for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        outputs = [
            request.num_tokens - request.num_prompt_tokens + request.num_output_placeholders
            for request in requests
        ]
        # Steady decodes never sit out a step.
        all_token_ids = {
            request.request_id: request.all_token_ids.copy()
            for request in requests
            if request.request_id not in previous_step
        }
        steady = self.steady
        if steady is not None:
            requests = steady.requests + requests
            req_ids = steady.request_ids + req_ids
            computed = steady.computed_counts + computed
            outputs = steady.output_counts + outputs
        new_block_ids: list[BlockIds | None]
        if self.new_block_ids:
            new_block_ids = list(map(self.new_block_ids.get, req_ids))
        else:
            new_block_ids = [None] * len(req_ids)
        for row, request in enumerate(self.resumed, start=len(req_ids) - len(self.resumed)):
            new_block_ids[row] = kv_cache_manager.get_block_ids(request.request_id)
        new_token_ids: list[list[int]] = []
        if send_new_token_ids:
            for request, first in zip(requests, computed):
                stop = first + self.num_scheduled[request.request_id]
                new_token_ids.append(request.all_token_ids[first:stop])
        return CachedRequestData(
            req_ids=req_ids,
            resumed_req_ids={request.request_id for request in self.resumed},
            new_token_ids=new_token_ids,
            all_token_ids=all_token_ids,
            new_block_ids=new_block_ids,
            num_computed_tokens=computed,
            num_output_tokens=outputs,
        )


def add_inputs(inputs: dict[str, list[int]], request_id: str, input_ids: list[int]) -> None:
    """Add media items of a request, in the order in which they stand in its prompt."""
    inputs[request_id] = sorted([*inputs.get(request_id, ()), *input_ids])


def _new_request_data(request: Request, kv_cache_manager: KVCacheManager) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        block_ids=kv_cache_manager.get_block_ids(request.request_id),
        num_computed_tokens=request.num_computed_tokens,
        mm_features=request.mm_features,
        pooling_params=request.pooling_params,
        lora_request=request.lora_request,
        prompt_embeds=request.prompt_embeds,
        seed=request.seed,
    )
