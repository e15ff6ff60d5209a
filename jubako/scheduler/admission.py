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
        waiting = self.waiting
        set_aside: list[Request] = []
        overtaken: list[Request] = []
        while waiting.has_ready and plan.token_budget > 0:
            if len(self.running) >= self.max_num_running_reqs:
                break
            request = waiting.peek()
            if not request.num_computed_tokens and self._is_full_of_active():
                if not any(r.awaits_admission for r in self._holders.values()):
                    break
                # Only who is active already may pass.
                set_aside.append(request)
                waiting.block(request)
                continue
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
                set_aside.append(request)
                waiting.block(request)
            elif verdict is Verdict.BLOCKED:
                waiting.block(request)
            elif verdict is Verdict.NO_ROOM:
                media_come = request.media_end > 0 and self.encoder_transfers.is_busy
                if self._reclaim_blocks(parked_only=bool(self.running), but=request):
                    continue
                if not self.running and not self._others_hold_blocks() and not media_come:
                    self._fail(request, self._too_long_message(request))
                elif self._may_be_overtaken(request) and len(overtaken) < self.admission_lookahead:
                    overtaken.append(request)
                    set_aside.append(request)
                    waiting.block(request)
                else:
                    break
            elif verdict is Verdict.NO_BUDGET:
                break
        for request in set_aside:
            waiting.unblock(request)

    def _is_full_of_active(self) -> bool:
        """Whether as many requests hold KV as may. Sessions without input do not count: they give
        it back when it is needed."""
        limit = self.config.scheduler_config.max_num_active_seqs
        if limit is None:
            return False
        active = len(self.running) + len(self.transfers.loads)
        active += sum(request_id not in self._parked for request_id in self._holders)
        return active >= limit

    def _may_be_overtaken(self, request: Request) -> bool:
        # One that has been preempted keeps a reader waiting in the middle of an answer.
        return (
            request.num_overtaken < self.admission_lookahead
            and request.status is RequestStatus.WAITING
        )

    def _try_to_admit(self, request: Request, plan: StepPlan) -> Verdict:
        """Look at the head of `waiting`; on SCHEDULED it is running and in the plan."""
        if not self.adapters.has_place(request):
            self.adapters.wait(request)
            return Verdict.BLOCKED
        manager = self.kv_cache_manager
        hit_blocks: KVCacheBlocks | None = None
        num_hits = num_external = 0
        loads_outside = False
        is_looked_up = request.num_computed_tokens == 0
        if is_looked_up:
            hit_blocks, num_hits = manager.get_computed_blocks(request)
            if self.chunk_ends.block_size > 1:
                request.shared_prefix_tokens = manager.get_shared_prefix_tokens(request)
            match = self.transfers.lookup.find(request, num_hits, plan.timestamp)
            if match is None:
                return Verdict.SET_ASIDE
            num_external, loads_outside = match.num_tokens, match.is_async
            if match.blocks is not None:
                hit_blocks = match.blocks
        computed = request.num_computed_tokens + num_hits + num_external
        if self._must_wait_for_others(request, computed, num_hits, num_external, plan):
            return Verdict.BLOCKED

        chunk: EncoderChunk | None = None
        count = 0
        reserved = 0
        if loads_outside:
            if self._loads_hold_half():
                return Verdict.NO_ROOM
            reserved = self._blocks_reserved_before_loads()
        else:
            count = self._limit_prefill(request, computed, request.num_tokens - computed, plan)
            if count > plan.token_budget:
                if not self.config.scheduler_config.enable_chunked_prefill:
                    return Verdict.NO_BUDGET
                count = plan.token_budget
            if self.chunk_ends.block_size > 1:
                count = self._round_chunk(request, computed, count, plan)
                if count <= 0:
                    return Verdict.NO_BUDGET
            if computed < request.media_end:
                chunk = self._plan_media(request, computed, count, plan)
                count = chunk.num_new_tokens
                if count <= 0:
                    release_claims(request, chunk, self.encoder_cache_manager)
                    return Verdict.NO_ROOM

        # With everything loaded the last token is computed again, and needs what it reads.
        repeated = int(loads_outside and computed == request.num_tokens)
        blocks = manager.allocate_slots(
            request,
            count + repeated,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=hit_blocks,
            num_lookahead_tokens=self.num_lookahead_tokens if request.num_computed_tokens else 0,
            num_external_computed_tokens=num_external - repeated,
            # Nothing that a load fills may be found before it is known to be good.
            delay_cache_blocks=num_external > 0
            or self._rests_on_loads(request, computed, count, plan),
            num_encoder_tokens=self._num_encoder_tokens(request),
            full_sequence_must_fit=self.config.scheduler_config.scheduler_reserve_full_isl,
            reserved_blocks=reserved,
            has_scheduled_reqs=bool(self.running),
        )
        if blocks is None:
            if chunk is not None:
                release_claims(request, chunk, self.encoder_cache_manager)
            return Verdict.NO_ROOM
        if is_looked_up:
            request.num_external_computed_tokens = num_external
            self.transfers.count_lookup(request, num_hits, num_external)
        if self.connector is not None:
            self.transfers.tell_blocks(
                request, manager.get_blocks(request.request_id), num_external
            )
        if num_external:
            end = 0 if loads_outside else computed + count
            self.transfers.begin(request, num_hits, num_external, plan.timestamp, end)
            plan.loading.append(request)
        if loads_outside:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            return Verdict.BLOCKED
        self._admit(request, computed, count, plan)
        if chunk is not None:
            self._commit_media(request, chunk, plan)
        return Verdict.SCHEDULED

    def _must_wait_for_others(
        self, request: Request, computed: int, num_hits: int, num_external: int, plan: StepPlan
    ) -> bool:
        """Whether something that the request needs is on its way already."""
        if num_external and self.enable_prefix_caching:
            owner = self.transfers.loaded_for(request, num_hits, num_external)
            if owner is not None:
                # Then it will be found here, and nothing is fetched twice.
                self._load_waiters.setdefault(owner, []).append(request)
                return True
        if self.encoder_transfers.must_wait(request, computed, plan.timestamp):
            request.status = RequestStatus.WAITING_FOR_REMOTE_EC
            return True
        return False

    def _num_encoder_tokens(self, request: Request) -> int:
        if not self.is_encoder_decoder or request.num_computed_tokens:
            return 0
        return sum(request.media_embeds)

    def _loads_hold_half(self) -> bool:
        """Whether loads hold half of the cache while others run: then no other may begin."""
        held = sum(map(self.kv_cache_manager.num_blocks_held, self.transfers.loads))
        return bool(self.running) and 2 * held >= self.kv_cache_config.num_blocks - 1

    def _blocks_reserved_before_loads(self) -> int:
        """Free blocks that are not for one more load.

        A load cannot give way and makes no progress by itself, so prompts that have begun must be
        able to end without its blocks.
        """
        begun = [*self._prefilling.values()]
        begun += [load.request for load in self.transfers.loads.values()]
        return sum(map(self.kv_cache_manager.num_blocks_to_finish, begun))

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
        self._holders.pop(request.request_id, None)
        for other in self.adapters.take(request):
            self.waiting.unblock(other)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, plan.timestamp)
        plan.num_scheduled[request.request_id] = count
        plan.token_budget -= count

    def _spend_leftover(self, plan: StepPlan) -> None:
        """Give tokens that nobody else could use back to the prompts that were cut for others."""
        for request_id, wanted in list(plan.shortened.items()):
            request = self.requests.get(request_id)
            count = plan.num_scheduled.get(request_id)
            if request is None or count is None or request.media_end > request.num_computed_tokens:
                continue
            more = min(wanted - count, plan.token_budget)
            if self.chunk_ends.block_size > 1:
                size = self.chunk_ends.block_size
                end = request.num_computed_tokens + count + more
                more -= 0 if end >= request.num_tokens else end % size
            if more <= 0:
                continue
            try:
                blocks = self.kv_cache_manager.allocate_slots(
                    request,
                    count + more,
                    num_lookahead_tokens=self.num_lookahead_tokens,
                    delay_cache_blocks=self._rests_on_loads(
                        request, request.num_computed_tokens, count + more, plan
                    ),
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
