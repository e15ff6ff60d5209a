"""Who computes how many tokens in the next step, and what follows from the tokens that come back?

There is no prefill and no decode: a request has `num_computed_tokens` and wants to catch up with
the tokens it knows, drafts included. `schedule` gives each running request what it wants as far as
token budget and KV blocks reach, preempting by recomputation when blocks run out, then admits
waiting requests. `update_from_output` takes the tokens of the step and ends requests.
"""

from __future__ import annotations

import time
from typing import Any

from jubako.scheduler.admission import AdmissionPlanner
from jubako.scheduler.engine_output import EngineCoreOutput, EngineCoreOutputs, SchedulerStats
from jubako.scheduler.model_output import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from jubako.scheduler.output import GrammarOutput, SchedulerOutput
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.step_plan import StepPlan
from jubako.scheduler.stop import check_stop


class Scheduler(AdmissionPlanner):
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
        self.kv_cache_manager.new_step_starts()
        # Earlier steps run before this one, so what they registered holds.
        self.kv_cache_manager.take_registered_block_ids()
        self.encoder_cache_manager.new_step_starts()
        if self.policy == "priority":
            self._displace(plan)
        if self._has_drafts:
            plan.draft_share = self._draft_share()
        self._schedule_running(plan)
        if self.waiting and not plan.preempted:
            self._schedule_waiting(plan)
        if plan.shortened and plan.token_budget > 0 and not plan.preempted:
            self._spend_leftover(plan)
        return self._finish_plan(plan)

    def _finish_plan(self, plan: StepPlan) -> SchedulerOutput:
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
                self.requests[request_id].uses_grammar for request_id in plan.num_scheduled
            )
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        if self.ec_connector is not None:
            output.ec_connector_metadata = self.ec_connector.build_connector_meta(output)
        self.prev_step_scheduled_req_ids = set(plan.num_scheduled)
        self._num_scheduled_tokens = output.total_num_scheduled_tokens
        self._step_counter += 1
        self._has_drafts = False
        self._update_after_schedule(plan, output)
        return output

    @property
    def _sends_new_token_ids(self) -> bool:
        """Whether sampled tokens must travel back: with pipeline stages, the first knows none."""
        return self.config.parallel_config.pipeline_parallel_size > 1

    def _update_after_schedule(self, plan: StepPlan, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed; the records keep the counts from before it."""
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
            if position.offset + position.length <= request.num_computed_tokens:
                self.encoder_cache_manager.free_encoder_input(request, input_id)

    # -- drafts and grammars ------------------------------------------------------------------

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the drafts to verify in the next step."""
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if request is None or request.is_prefill_chunk:
                continue
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.uses_grammar and self.structured_output_manager is not None:
                drafts = self.structured_output_manager.validate_drafts(request, drafts)
            request.spec_token_ids = list(drafts)
            self._has_drafts = self._has_drafts or bool(drafts)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """The token masks of this step, or None if no request in it has a grammar."""
        manager = self.structured_output_manager
        if manager is None or not scheduler_output.has_structured_output_requests:
            return None
        requests = [
            request
            for request_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(request_id)) is not None and request.uses_grammar
        ]
        if not requests:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return GrammarOutput(
            structured_output_request_ids=[request.request_id for request in requests],
            grammar_bitmask=manager.grammar_bitmask(requests, drafts),
        )

    # -- after the model ----------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the step's tokens, end requests; what each front end is to hear, by its index."""
        if self.ec_connector is not None and model_runner_output.ec_connector_output is not None:
            self.ec_connector.update_connector_output(model_runner_output.ec_connector_output)
        outputs: dict[int, list[EngineCoreOutput]] = {}
        ended: set[Request] = set()
        requests = self.requests
        rows = model_runner_output.req_id_to_index
        for request_id in scheduler_output.num_scheduled_tokens:
            request = requests.get(request_id)
            if request is None:
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
                else:
                    self.waiting.remove(request)
            client = outputs.get(request.client_index)
            if client is None:
                outputs[request.client_index] = [output]
            else:
                client.append(output)
        if ended:
            self.running = [request for request in self.running if request not in ended]
        if model_runner_output.kv_connector_output is not None:
            self._update_from_connector(model_runner_output.kv_connector_output)
        for client_index, output in self._failed:
            outputs.setdefault(client_index, []).append(output)
        self._failed = []
        return self._to_messages(outputs)

    def _update_request(
        self,
        request: Request,
        row: int,
        scheduler_output: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """Take one request's part of the result; None if there is nothing to tell."""
        request_id = request.request_id
        new_token_ids = result.sampled_token_ids[row] if result.sampled_token_ids else []
        if scheduler_output.scheduled_spec_decode_tokens and new_token_ids:
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id)
            if drafts:
                self._take_back_rejected(request, len(drafts) + 1 - len(new_token_ids))
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
            logprobs,
            prompt_logprobs,
            pooled,
            events=request.take_events() if request.events else None,
            num_cached_tokens=request.num_cached_tokens,
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

    # -- control ------------------------------------------------------------------------------

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; False, with nothing forgotten, if blocks are in use.

        With `reset_running_requests` running requests are preempted first and computed again from
        nothing. With `reset_connector` the connector must forget too.
        """
        if reset_running_requests:
            timestamp = time.monotonic()
            while self.running:
                request = self.running.pop()
                self._preempt(request, timestamp)
                self._drop_tokens_in_flight(request)
                self.waiting.put_back([request])
            # Whoever comes back brings all its tokens, even straight after its last step.
            self.prev_step_scheduled_req_ids = set()
        done = self.kv_cache_manager.reset_prefix_cache()
        if reset_connector and self.connector is not None:
            done = self.connector.reset_cache() and done
        return done

    def _drop_tokens_in_flight(self, request: Request) -> None:
        """Nothing is in flight between two steps unless steps overlap."""

    def reset_encoder_cache(self) -> None:
        """Forget all encoder outputs, because the weights that made them changed."""
        self.encoder_cache_manager.reset()

    def make_stats(self) -> SchedulerStats | None:
        """The state after a step, with counts since the last report; None without `log_stats`."""
        if not self.log_stats:
            return None
        stats = SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            step_counter=self._step_counter,
            kv_cache_usage=self.kv_cache_manager.usage,
            encoder_cache_usage=self.encoder_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats(),
            num_preemptions=self._num_preemptions,
            num_scheduled_tokens=self._num_scheduled_tokens,
        )
        if self._kv_metrics is not None:
            stats.kv_cache_eviction_events = self._kv_metrics.drain_events()
        self._num_preemptions = 0
        self._num_scheduled_tokens = 0
        return stats

    def take_kv_cache_events(self) -> list[Any]:
        """Blocks that came and went since the last call, if events are on."""
        return self.kv_cache_manager.take_events()

    def shutdown(self) -> None:
        """Let connectors end."""
        for connector in (self.connector, self.ec_connector):
            if connector is not None:
                connector.shutdown()
