"""How is a step planned before the tokens of the one before are known?

A request in flight counts with the tokens that it will have: `num_output_placeholders`. Everything
scheduled and not yet back is in `num_in_flight_tokens`. A preemption makes that stale: what it
brings is still delivered, in order, but touches no counter of the request's new life.
"""

from __future__ import annotations

from jubako.errors import NotImplementedFeatureError
from jubako.scheduler.engine_output import EngineCoreOutput
from jubako.scheduler.model_output import DraftTokenIds, ModelRunnerOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.running import Verdict
from jubako.scheduler.scheduler import Scheduler
from jubako.scheduler.step_plan import StepPlan


class AsyncScheduler(Scheduler):
    """A scheduler whose `schedule` may run ahead of `update_from_output`.

    Steps must come back in the order in which they were scheduled. A request that ends with a stop
    token may have one more token computed, which is thrown away.
    """

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts cannot be combined with overlapping steps yet."""
        raise NotImplementedFeatureError(
            "Speculative decoding does not work with async_scheduling; turn one of them off.",
            "async_scheduling",
        )

    def _update_after_schedule(self, plan: StepPlan, output: SchedulerOutput) -> None:
        super()._update_after_schedule(plan, output)
        waits_for_tokens = False
        for requests in (plan.running, plan.new, plan.resumed):
            for request in requests:
                request.num_in_flight_tokens += plan.num_scheduled[request.request_id]
                if request.uses_grammar and request.num_output_placeholders:
                    waits_for_tokens = True
                if not request.is_prefill_chunk and request.sampling_params is not None:
                    request.num_output_placeholders += 1
        output.pending_structured_output_tokens = waits_for_tokens

    def _preempt(self, request: Request, timestamp: float) -> None:
        super()._preempt(request, timestamp)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0

    def _drop_tokens_in_flight(self, request: Request) -> None:
        request.drop_stale_tokens = request.num_stale_tokens > 0

    def _try_to_admit(self, request: Request, plan: StepPlan) -> Verdict:
        if request.num_stale_tokens and not request.drop_stale_tokens:
            # Its next tokens are not known before those that are still to be delivered.
            return Verdict.SET_ASIDE
        return super()._try_to_admit(request, plan)

    def _update_request(
        self,
        request: Request,
        row: int,
        scheduler_output: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        count = scheduler_output.num_scheduled_tokens[request.request_id]
        request.num_in_flight_tokens -= count
        if request.num_stale_tokens:
            request.num_stale_tokens -= count
            if not request.drop_stale_tokens:
                return super()._update_request(request, row, scheduler_output, result)
            request.drop_stale_tokens = request.num_stale_tokens > 0
            return None
        output = super()._update_request(request, row, scheduler_output, result)
        if output is not None and output.finish_reason is None:
            request.num_output_placeholders -= len(output.new_token_ids)
            if request.status is RequestStatus.RUNNING:
                self.kv_cache_manager.cache_blocks(
                    request, request.num_computed_tokens - request.num_output_placeholders
                )
        return output
