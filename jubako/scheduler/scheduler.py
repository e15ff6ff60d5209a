"""Who computes how many tokens in the next step, and what follows from the tokens that come back?

There is no prefill and no decode: a request has `num_computed_tokens` and wants to catch up with
the tokens it knows, drafts included. `schedule` gives each running request what it wants as far as
token budget and KV blocks reach, preempting by recomputation when blocks run out, then admits
waiting requests. `update_from_output` takes the tokens of the step and ends requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice

from jubako.errors import JubakoError
from jubako.scheduler.admission import AdmissionPlanner
from jubako.scheduler.control import Control
from jubako.scheduler.drafts_and_grammars import DraftsAndGrammars
from jubako.scheduler.engine_output import (
    EngineCoreOutput,
    EngineCoreOutputs,
)
from jubako.scheduler.model_output import LogprobsLists, ModelRunnerOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.step_plan import StepPlan
from jubako.scheduler.stop import check_stop


class Scheduler(AdmissionPlanner, DraftsAndGrammars, Control):
    """Continuous batching with chunked prefill, prefix caching, preemption and two policies.

    Not thread-safe: all methods are called from the engine's loop.
    """

    def schedule(self) -> SchedulerOutput:
        """Plan the next step: running requests first, then admissions."""
        plan = StepPlan(
            token_budget=self.max_num_scheduled_tokens,
            encoder_budget=self.max_encoder_tokens,
            timestamp=time.monotonic(),
        )
        if not self.is_paused:
            # What has been loaded is there, so it may be shared at once.
            self._wake_blocked(plan.timestamp)
        self.transfers.holds.expire(plan.timestamp)
        self.encoder_transfers.expire_sends(plan.timestamp)
        self.kv_cache_manager.new_step_starts()
        # Earlier steps run before this one, so what they registered holds.
        self.kv_cache_manager.settle_registered_blocks()
        self.encoder_cache_manager.new_step_starts()
        if self.is_paused:
            return self._finish_plan(plan)
        if self._cut_back_ids:
            plan.preempted, self._cut_back_ids = self._cut_back_ids, set()
        if self.policy == "priority":
            self._displace(plan)
        if self._has_drafts:
            plan.draft_share = self._draft_share()
        self._schedule_steady(plan)
        self._schedule_running(plan)
        if self.waiting.has_ready and not plan.preempted:
            self._schedule_waiting(plan)
        if plan.shortened and plan.token_budget > 0 and not plan.preempted:
            self._spend_leftover(plan)
        return self._finish_plan(plan)

    def _finish_plan(self, plan: StepPlan) -> SchedulerOutput:
        if plan.external_inputs:
            self._order_encoder_outputs(plan)
        output = plan.to_output(
            self.kv_cache_manager,
            self.prev_step_scheduled_req_ids,
            send_new_token_ids=self._sends_new_token_ids,
        )
        if len(self.running) > 1:
            output.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(
                self.running[0].request_id
            )
        else:
            # A lone request shares nothing, and counting a long context costs more than the rest.
            output.num_common_prefix_blocks = [0] * len(self.kv_cache_config.kv_cache_groups)
        output.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        output.free_encoder_mm_hashes = self.encoder_cache_manager.get_freed_mm_hashes()
        if self.structured_output_manager is not None:
            output.has_structured_output_requests = any(
                request.uses_grammar
                for planned in (plan.running, plan.new, plan.resumed)
                for request in planned
            )
        output.kv_connector_metadata, told = self.transfers.build_metadata(output)
        for request in plan.loading:
            load = self.transfers.step_loads.get(request.request_id)
            if load is not None:
                load.step = output
        if not told:
            self._fail_untold_loads(plan.loading)
        output.ec_connector_metadata, told = self.encoder_transfers.build_metadata(output)
        if not told:
            self._untold_outputs.append((output, self._identifiers(plan.external_inputs)))
        if self.ec_connector is not None:
            self._note_loading_outputs(plan, output)
        self.prev_step_scheduled_req_ids = plan.num_scheduled.keys()
        self._num_scheduled_tokens = output.total_num_scheduled_tokens
        self._step_counter += 1
        self._has_drafts = False
        self._update_after_schedule(plan, output)
        if plan.steady is not None:
            self._in_flight = output, plan.steady.requests
        else:
            self._steady.clear(self.running)
            self._in_flight = output, []
        return output

    @property
    def _has_drafter(self) -> bool:
        """Whether a drafter reads along, so that no decode is about one token only."""
        return self.num_lookahead_tokens > 0 or self.drafter_shift > 0

    @property
    def _sends_new_token_ids(self) -> bool:
        """Whether sampled tokens must travel back: with pipeline stages, the first knows none."""
        return self.config.parallel_config.pipeline_parallel_size > 1

    def _update_after_schedule(self, plan: StepPlan, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed; the records keep the counts from before it."""
        if plan.steady is not None:
            plan.steady.advance()
        num_scheduled = plan.num_scheduled
        prefilling = self._prefilling
        for requests in (plan.running, plan.new, plan.resumed):
            for request in requests:
                computed = request.num_computed_tokens + num_scheduled[request.request_id]
                request.num_computed_tokens = computed
                if computed < request.num_tokens + request.num_output_placeholders:
                    request.is_prefill_chunk = True
                    prefilling[request.request_id] = request
                elif request.is_prefill_chunk:
                    request.is_prefill_chunk = False
                    del prefilling[request.request_id]
                if request.mm_features:
                    self._release_media(request)

    def _release_media(self, request: Request) -> None:
        for input_id, feature in enumerate(request.mm_features):
            position = feature.mm_position
            end = 1 if self.is_encoder_decoder else position.offset + position.length
            if end + self.drafter_shift <= request.num_computed_tokens:
                self.encoder_cache_manager.free_encoder_input(request, input_id)
            elif end <= request.num_computed_tokens:
                self.encoder_cache_manager.yield_encoder_input(request, input_id)

    # -- after the model ----------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the step's tokens, end requests; what each front end is to hear, by its index.

        ValueError, with nothing changed, if the step's result was taken before.
        """
        self._begin_update(scheduler_output)
        void = self._take_failures(scheduler_output, model_runner_output)
        outputs: dict[int, list[EngineCoreOutput]] = {}
        ended: set[Request] = set()
        requests = self.requests
        rows = model_runner_output.req_id_to_index
        remaining: Iterable[str] = scheduler_output.num_scheduled_tokens
        if self._in_flight is not None and self._in_flight[0] is scheduler_output:
            planned = self._in_flight[1]
            self._in_flight = None
            if planned:
                remaining = self._update_steady(
                    planned, scheduler_output, model_runner_output, outputs, ended
                )
        for request_id in remaining:
            request = requests.get(request_id)
            if request is None:
                continue
            if request_id in void and not request.num_stale_tokens:
                continue
            was_running = request.status is RequestStatus.RUNNING
            try:
                output = self._update_request(
                    request, rows[request_id], scheduler_output, model_runner_output
                )
            except Exception as error:
                self._fail_with(request, error)
                continue
            if output is None:
                continue
            if output.finish_reason is not None:
                if was_running:
                    ended.add(request)
                elif request.is_finished:
                    self.waiting.remove(request)
            elif self.plans_steady and self._in_flight is None and not self._has_drafter:
                self._steady.consider(request)
            outputs.setdefault(request.client_index, []).append(output)
        if ended:
            self.running = [request for request in self.running if request not in ended]
        if model_runner_output.kv_connector_output is not None:
            self._take_transfer_reports(model_runner_output.kv_connector_output)
        for client_index, output in self._failed:
            outputs.setdefault(client_index, []).append(output)
        self._failed = []
        return self._to_messages(outputs)

    def _begin_update(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.is_over:
            raise ValueError("this step's result has been taken already; hand in each step once")
        scheduler_output.is_over = True

    def _update_steady(
        self,
        planned: list[Request],
        scheduler_output: SchedulerOutput,
        result: ModelRunnerOutput,
        outputs: dict[int, list[EngineCoreOutput]],
        ended: set[Request],
    ) -> Iterable[str]:
        """Take the tokens of the steady decodes; ids of the requests that remain to be looked at.

        `planned` are the steady decodes as the step began; some may have been aborted since.
        """
        steady = self._steady
        order = scheduler_output.num_scheduled_tokens
        requests = steady.refresh(self.running, only_first=False)
        appended = None if result.num_nans_in_logits else steady.append(result)
        if appended is None:
            steady.clear(self.running)
            return order
        made, eventful = appended
        failed: set[int] = set()
        for place, request in eventful:
            try:
                if request.num_tokens >= request.tokens_to_next_hash:
                    request.extend_block_hashes()
                may_end = (
                    request.num_tokens >= request.total_token_limit
                    or request.all_token_ids[-1] in request.ending_token_ids
                )
                if not may_end or not check_stop(request):
                    steady.note_next_event(request)
                else:
                    output = made[place]
                    output.finish_reason = request.finish_reason
                    output.stop_reason = request.stop_reason
                    output.kv_transfer_params = self._free_request(request)
                    ended.add(request)
            except Exception as error:
                failed.add(place)
                self._fail_with(request, error)
        client_index = steady.client_index
        if made and not failed and client_index is not None:
            outputs[client_index] = made
        else:
            for place, (request, output) in enumerate(zip(requests, made)):
                if place not in failed:
                    outputs.setdefault(request.client_index, []).append(output)
        remaining = islice(order, len(planned), None)
        if len(requests) < len(planned):
            taken = set(steady.request_ids)
            return [request_id for request_id in order if request_id not in taken]
        return remaining

    def _update_request(
        self,
        request: Request,
        row: int,
        scheduler_output: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """Take one request's part of the result; None if there is nothing to tell."""
        request_id = request.request_id
        if result.failures is not None and request_id in result.failures:
            raise JubakoError(result.failures[request_id])
        new_token_ids = result.sampled_token_ids[row] if result.sampled_token_ids else []
        if scheduler_output.scheduled_spec_decode_tokens and new_token_ids:
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id)
            if drafts:
                self._take_back_rejected(request, len(drafts) + 1 - len(new_token_ids))
                refused = (scheduler_output.num_invalid_spec_tokens or {}).get(request_id, 0)
                self._spec_decoding.observe(len(drafts) - refused, len(new_token_ids) - 1)
        if len(new_token_ids) == 1:
            # What nearly every call is about.
            stopped = self._append_token(request, new_token_ids[0])
        else:
            new_token_ids, stopped = self._append_tokens(request, new_token_ids)
        pooled = None
        if result.pooler_output:
            pooled = result.pooler_output[row]
            if pooled is not None and request.pooling_params is not None:
                request.status = RequestStatus.FINISHED_STOPPED
                stopped = True
        if not new_token_ids and not stopped:
            return None

        params = request.sampling_params
        logprobs: LogprobsLists | None = None
        if (
            result.logprobs is not None
            and params is not None
            and params.logprobs is not None
            and new_token_ids
        ):
            logprobs = result.logprobs.slice_request(row, len(new_token_ids))
        if request.uses_grammar and self.structured_output_manager is not None:
            self.structured_output_manager.accept_tokens(request, new_token_ids)
        prompt_logprobs = None
        if result.prompt_logprobs_dict:
            prompt_logprobs = result.prompt_logprobs_dict.get(request_id)
        output = EngineCoreOutput(
            request_id,
            new_token_ids,
            request.num_cached_tokens,
            logprobs,
            prompt_logprobs,
            pooled,
            events=request.take_events() if request.events else None,
        )
        if request.num_external_computed_tokens:
            output.num_external_computed_tokens = request.num_external_computed_tokens
        if request.trace_headers is not None:
            output.trace_headers = request.trace_headers
        if result.num_nans_in_logits:
            output.num_nans_in_logits = result.num_nans_in_logits.get(request_id, 0)
        if stopped:
            output.finish_reason = request.finish_reason
            output.stop_reason = request.stop_reason
            if not request.resumable or not self._end_turn(request):
                output.kv_transfer_params = self._free_request(request)
        return output

    def _take_back_rejected(self, request: Request, num_rejected: int) -> None:
        """KV of refused drafts is not kept; it is overwritten by what comes next."""
        if num_rejected > 0 and request.num_computed_tokens > 0:
            request.num_computed_tokens -= num_rejected

    def _append_token(self, request: Request, token_id: int) -> bool:
        """Append a token; whether the request ends with it."""
        request.all_token_ids.append(token_id)
        num_tokens = request.num_tokens = request.num_tokens + 1
        if num_tokens >= request.tokens_to_next_hash:
            request.extend_block_hashes()
        # Most tokens cannot end anything; those that might are looked at closely.
        if (
            num_tokens >= request.total_token_limit
            or token_id == request.eos_token_id
            or token_id in request.stop_token_ids
        ):
            return check_stop(request)
        return False

    def _append_tokens(self, request: Request, token_ids: list[int]) -> tuple[list[int], bool]:
        """Append tokens up to the one that ends the request; the kept ones, and whether it ends."""
        for position, token_id in enumerate(token_ids):
            if self._append_token(request, token_id):
                return token_ids[: position + 1], True
        return token_ids, False

    def _to_messages(
        self, outputs: dict[int, list[EngineCoreOutput]]
    ) -> dict[int, EngineCoreOutputs]:
        messages = {
            client_index: EngineCoreOutputs(outputs=of_client)
            for client_index, of_client in outputs.items()
        }
        if self._finished_by_client is not None:
            for client_index, finished in self._finished_by_client.items():
                message = messages.setdefault(client_index, EngineCoreOutputs())
                message.finished_requests = finished
            self._finished_by_client = {}
        stats = self.make_stats()
        if stats is not None:
            # One front end is enough; it need not be one that has outputs.
            first = next(iter(messages), 0)
            messages.setdefault(first, EngineCoreOutputs()).scheduler_stats = stats
        return messages
