"""Which waiting requests may begin, or begin again, in this step?"""

from __future__ import annotations

from jubako.kv_cache import KVCacheBlocks
from jubako.scheduler.encoder_scheduling import EncoderChunk, release_claims
from jubako.scheduler.engine_output import EngineCoreEventType
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.running import RunningPlanner, Verdict
from jubako.scheduler.step_plan import StepPlan


class AdmissionPlanner(RunningPlanner):
    """The second phase of a step: admissions, most urgent first."""

    def _schedule_waiting(self, plan: StepPlan) -> None:
        if self.max_loras is not None:
            plan.lora_ids = {
                r.lora_request.lora_int_id for r in plan.running if r.lora_request is not None
            }
        set_aside: list[Request] = []
        overtaken: list[Request] = []
        while self.waiting and plan.token_budget > 0:
            if len(self.running) >= self.max_num_running_reqs:
                break
            request = self.waiting.peek()
            try:
                verdict = self._try_to_admit(request, plan)
            except Exception as error:
                self._fail_in_step(request, plan, error)
                verdict = Verdict.FAILED
            if verdict is Verdict.SCHEDULED:
                for other in overtaken:
                    other.num_overtaken += 1
                if any(r.num_overtaken >= self.admission_lookahead for r in overtaken):
                    break
            elif verdict is Verdict.SET_ASIDE:
                set_aside.append(self.waiting.pop())
            elif verdict is Verdict.NO_ROOM:
                if not self.running and not self._others_hold_blocks():
                    self._fail(request, self._too_long_message(request))
                elif self._may_be_overtaken(request) and len(overtaken) < self.admission_lookahead:
                    overtaken.append(request)
                    set_aside.append(self.waiting.pop())
                else:
                    break
            elif verdict is Verdict.NO_BUDGET:
                break
        self.waiting.put_back(set_aside)

    def _may_be_overtaken(self, request: Request) -> bool:
        # One that has been preempted keeps a reader waiting in the middle of an answer.
        return (
            request.num_overtaken < self.admission_lookahead
            and request.status is RequestStatus.WAITING
        )

    def _try_to_admit(self, request: Request, plan: StepPlan) -> Verdict:
        """Look at the head of `waiting`; on SCHEDULED it is running and in the plan."""
        if not request.awaits_admission and not self._is_unblocked(request):
            return Verdict.SET_ASIDE
        lora = request.lora_request
        if (
            self.max_loras is not None
            and lora is not None
            and lora.lora_int_id not in plan.lora_ids
            and len(plan.lora_ids) >= self.max_loras
        ):
            return Verdict.SET_ASIDE

        manager = self.kv_cache_manager
        hit_blocks: KVCacheBlocks | None = None
        num_hits = 0
        num_external = 0
        loads_outside = False
        if request.num_computed_tokens == 0:
            hit_blocks, num_hits = manager.get_computed_blocks(request)
            if self.connector is not None and not request.skip_reading_prefix_cache:
                matched, loads_outside = self.connector.get_num_new_matched_tokens(
                    request, num_hits
                )
                if matched is None:
                    return Verdict.SET_ASIDE
                num_external = matched
        computed = request.num_computed_tokens + num_hits + num_external

        chunk: EncoderChunk | None = None
        count = 0
        if not loads_outside:
            count = self._limit_prefill(request, request.num_tokens - computed, plan)
            if count > plan.token_budget:
                if not self.config.scheduler_config.enable_chunked_prefill:
                    return Verdict.NO_BUDGET
                count = plan.token_budget
            if computed < request.media_end:
                chunk = self._plan_media(request, computed, count, plan)
                count = chunk.num_new_tokens
                if count <= 0:
                    release_claims(request, chunk, self.encoder_cache_manager)
                    return Verdict.NO_ROOM

        blocks = manager.allocate_slots(
            request,
            count,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=hit_blocks,
            num_lookahead_tokens=self.num_lookahead_tokens if request.num_computed_tokens else 0,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=num_external > 0,
            full_sequence_must_fit=self.config.scheduler_config.scheduler_reserve_full_isl,
            has_scheduled_reqs=bool(self.running),
        )
        if blocks is None:
            if chunk is not None:
                release_claims(request, chunk, self.encoder_cache_manager)
            return Verdict.NO_ROOM
        if self.connector is not None:
            self.connector.update_state_after_alloc(
                request, manager.get_blocks(request.request_id), num_external
            )
        if num_external:
            request.num_external_computed_tokens = num_external
        if loads_outside:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self._loaded[request.request_id] = computed
            return Verdict.SET_ASIDE
        self._admit(request, computed, count, plan)
        if chunk is not None:
            self._commit_media(request, chunk, plan)
        return Verdict.SCHEDULED

    def _admit(self, request: Request, computed: int, count: int, plan: StepPlan) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        (plan.new if request.status is RequestStatus.WAITING else plan.resumed).append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = computed
        request.kv_event_tokens = self.kv_cache_manager.next_event_tokens(request.request_id)
        request.num_overtaken = 0
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = computed
        if request.lora_request is not None:
            plan.lora_ids.add(request.lora_request.lora_int_id)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, plan.timestamp)
        plan.num_scheduled[request.request_id] = count
        plan.token_budget -= count

    def _is_unblocked(self, request: Request) -> bool:
        """Whether what a blocked request waited for has come; then it awaits admission."""
        if request.status is RequestStatus.WAITING_FOR_FSM:
            assert self.structured_output_manager is not None
            if not self.structured_output_manager.is_ready(request):
                return False
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self._finished_recving:
                return False
            self._finished_recving.discard(request.request_id)
            # The last token is computed here even if its KV came along: it makes the logits.
            loaded = min(self._loaded.pop(request.request_id), request.num_tokens - 1)
            request.num_computed_tokens = loaded
            self.kv_cache_manager.cache_blocks(request, loaded)
            if request.num_preemptions:
                request.status = RequestStatus.PREEMPTED
                return True
        else:
            return False
        request.status = RequestStatus.WAITING
        return True

    def _spend_leftover(self, plan: StepPlan) -> None:
        """Give tokens that nobody else could use back to the prompts that were cut for others."""
        for request_id, wanted in list(plan.shortened.items()):
            request = self.requests.get(request_id)
            count = plan.num_scheduled.get(request_id)
            if request is None or count is None or request.media_end > request.num_computed_tokens:
                continue
            more = min(wanted - count, plan.token_budget)
            if more <= 0:
                continue
            try:
                blocks = self.kv_cache_manager.allocate_slots(
                    request, count + more, num_lookahead_tokens=self.num_lookahead_tokens
                )
            except Exception as error:
                self._fail_in_step(request, plan, error)
                continue
            if blocks is None:
                continue
            request.kv_event_tokens = self.kv_cache_manager.next_event_tokens(request_id)
            plan.num_scheduled[request_id] = count + more
            plan.token_budget -= more
            if request in plan.running:
                plan.add_block_ids(request_id, blocks.get_block_ids(allow_none=True))
