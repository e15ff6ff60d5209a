"""How is a step planned before the tokens of the one before are known?

A request in flight counts with the tokens that it will have: `num_output_placeholders`. Everything
scheduled and not yet back is in `num_in_flight_tokens`. A preemption makes that stale: what it
brings is still delivered, in order, but touches no counter of the request's new life.

Drafts are counted before they exist: a request that decodes is given `num_spec_tokens` drafts with
the id -1, which the worker replaces by those that it made itself. Positions are planned as if all
of them were accepted; what comes back takes the others away again.
"""

from __future__ import annotations

from typing import Any

from jubako.errors import ValidationError
from jubako.scheduler.engine_output import EngineCoreOutput, EngineCoreOutputs
from jubako.scheduler.model_output import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.running import Verdict
from jubako.scheduler.scheduler import Scheduler
from jubako.scheduler.step_plan import StepPlan

DRAFT_PLACEHOLDER = -1
"""Stands for a draft that only the worker knows, or for one that a grammar refused."""


class OverlappingScheduler(Scheduler):
    """A scheduler whose `schedule` may run ahead of `update_from_output`.

    Steps must come back in the order in which they were scheduled. Chunks of a prompt may be in
    flight together; a token is computed only once those before it are known.
    """

    plans_steady = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `SchedulerState`."""
        super().__init__(*args, **kwargs)
        self._ended_in_flight: dict[str, int] = {}
        """Tokens in flight of requests that have ended: whoever took such an id now would be given
        another's tokens."""
        self._coming_back: dict[str, int] = {}
        """Tokens of the step that is being looked at, of requests that have not had their turn."""
        self._kept_prompt_logprobs: dict[str, LogprobsLists] = {}
        """Workers tell them once, perhaps with a token that is thrown away."""

    def add_request(self, request: Request) -> None:
        """See `Scheduler`; an id is in use until its last step has come back."""
        request_id = request.request_id
        if request_id in self._ended_in_flight:
            raise ValidationError(
                f"request_id {request_id!r} is in use; choose another.", "request_id", request_id
            )
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See `Scheduler`; for the oldest step in flight."""
        try:
            return super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._coming_back = {}

    def _begin_update(self, scheduler_output: SchedulerOutput) -> None:
        super()._begin_update(scheduler_output)
        if self._ended_in_flight:
            self._forget_ended(scheduler_output)
        self._coming_back = dict(scheduler_output.num_scheduled_tokens)

    def _forget_ended(self, scheduler_output: SchedulerOutput) -> None:
        counts = scheduler_output.num_scheduled_tokens
        for request_id in self._ended_in_flight.keys() & counts.keys():
            self._ended_in_flight[request_id] -= counts[request_id]
            if not self._ended_in_flight[request_id]:
                del self._ended_in_flight[request_id]

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take drafts of requests of which nothing is in flight.

        Which drafts follow tokens that are not known here yet, only the worker knows.
        """
        known: tuple[list[str], list[list[int]]] = ([], [])
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if request is not None and not request.num_in_flight_tokens:
                known[0].append(request_id)
                known[1].append(drafts)
        super().update_draft_token_ids(DraftTokenIds(*known))

    def _update_after_schedule(self, plan: StepPlan, output: SchedulerOutput) -> None:
        super()._update_after_schedule(plan, output)
        for requests in (plan.running, plan.new, plan.resumed):
            for request in requests:
                request.num_in_flight_tokens += plan.num_scheduled[request.request_id]

    def _preempt(self, request: Request, timestamp: float) -> None:
        super()._preempt(request, timestamp)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_draft_placeholders = 0

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
        request_id = request.request_id
        count = self._coming_back.pop(request_id)
        request.num_in_flight_tokens -= count
        if request.num_stale_tokens:
            request.num_stale_tokens -= count
            if request.drop_stale_tokens:
                request.drop_stale_tokens = request.num_stale_tokens > 0
                prompt_logprobs = result.prompt_logprobs_dict.get(request_id)
                if prompt_logprobs is not None:
                    self._kept_prompt_logprobs[request_id] = prompt_logprobs
                return None
            return super()._update_request(request, row, scheduler_output, result)
        return self._update_live(request, row, scheduler_output, result)

    def _update_live(
        self,
        request: Request,
        row: int,
        scheduler_output: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """Take what a step brings that was scheduled since the last preemption."""
        # Looked up before the request can end.
        kept = None
        if self._kept_prompt_logprobs:
            kept = self._kept_prompt_logprobs.get(request.request_id)
        output = super()._update_request(request, row, scheduler_output, result)
        if kept is not None and output is not None:
            output.new_prompt_logprobs_tensors = kept
            self._kept_prompt_logprobs.pop(request.request_id, None)
        return output

    def _free_request(self, request: Request) -> dict[str, Any] | None:
        request_id = request.request_id
        later = request.num_in_flight_tokens - self._coming_back.get(request_id, 0)
        if later:
            self._ended_in_flight[request_id] = later
        self._kept_prompt_logprobs.pop(request_id, None)
        return super()._free_request(request)


class AsyncScheduler(OverlappingScheduler):
    """A scheduler that gives a request its next token before the last one is known.

    A request that ends with a stop token may have more tokens computed, which are thrown away.
    """

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put the drafts that a worker made into a step that has begun and is not sampled yet.

        They are cut to the number that was scheduled and to those that the grammar allows, and
        filled up with `DRAFT_PLACEHOLDER`, which no model accepts. `num_invalid_spec_tokens` says
        how many a grammar refused.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        invalid: dict[str, int] = {}
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            places = len(scheduled.get(request_id, ()))
            if request is None or not places:
                continue
            kept = list(drafts[:places])
            if request.uses_grammar and self.structured_output_manager is not None:
                given = len(kept)
                kept = self.structured_output_manager.validate_drafts(request, kept)
                if len(kept) < given:
                    invalid[request_id] = given - len(kept)
            scheduled[request_id] = kept + [DRAFT_PLACEHOLDER] * (places - len(kept))
        if invalid:
            scheduler_output.num_invalid_spec_tokens = invalid

    def _allocate_running(self, request: Request, count: int, plan: StepPlan) -> Verdict:
        # Of drafts in flight all may be refused. What a window still needs then must not be let go,
        # so they count among the tokens to come.
        drafts = request.num_draft_placeholders
        request.num_computed_tokens -= drafts
        verdict = super()._allocate_running(request, count + drafts, plan)
        if verdict is Verdict.SCHEDULED:
            request.num_computed_tokens += drafts
        return verdict

    def _update_after_schedule(self, plan: StepPlan, output: SchedulerOutput) -> None:
        super()._update_after_schedule(plan, output)
        waits_for_tokens = False
        for requests in (plan.running, plan.new, plan.resumed):
            for request in requests:
                if request.uses_grammar and request.num_output_placeholders:
                    waits_for_tokens = True
                if request.is_prefill_chunk or request.sampling_params is None:
                    continue
                num_drafts = len(plan.drafts.get(request.request_id, ()))
                request.num_output_placeholders += 1 + num_drafts
                request.num_draft_placeholders += num_drafts
                request.spec_token_ids = [DRAFT_PLACEHOLDER] * self.num_spec_tokens
        self._has_drafts = self.num_spec_tokens > 0
        output.pending_structured_output_tokens = waits_for_tokens

    def _free_request(self, request: Request) -> dict[str, Any] | None:
        generated_its_end = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        has_kv = request.num_computed_tokens >= request.num_tokens - 1
        if generated_its_end and request.sampling_params is not None and has_kv:
            # All but the last token have KV; the next turn of a conversation begins with them.
            self.kv_cache_manager.cache_blocks(request, request.num_tokens - 1)
        return super()._free_request(request)

    def _update_live(
        self,
        request: Request,
        row: int,
        scheduler_output: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        output = super()._update_live(request, row, scheduler_output, result)
        if output is None or output.finish_reason is not None:
            return output
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id)
        if drafts:
            # Whether it brought tokens or not, the step owes no more.
            request.num_output_placeholders -= 1 + len(drafts)
            request.num_draft_placeholders -= len(drafts)
        else:
            request.num_output_placeholders -= len(output.new_token_ids)
        if request.status is RequestStatus.RUNNING:
            self.kv_cache_manager.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )
        return output
