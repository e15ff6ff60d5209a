"""How many tokens do the running requests get, and who gives way when blocks run out?"""

from __future__ import annotations

from enum import Enum, auto

from jubako.scheduler.encoder_cache import EncoderInput
from jubako.scheduler.encoder_scheduling import (
    EncoderChunk,
    commit,
    plan_encoder_chunk,
    release_claims,
)
from jubako.scheduler.fair_share import MAX_SHARING_PREFILLS, fair_share
from jubako.scheduler.request import Request
from jubako.scheduler.step_plan import StepPlan, add_inputs
from jubako.scheduler.waking import Waking


class Verdict(Enum):
    """What became of a request that was looked at."""

    SCHEDULED = auto()
    SET_ASIDE = auto()
    """It cannot be decided now; others go on, and it is looked at again in the next step."""
    BLOCKED = auto()
    """It waits for an event; others go on."""
    NO_ROOM = auto()
    """Blocks or encoder outputs do not fit now."""
    NO_BUDGET = auto()
    """It needs more tokens than this step has left."""
    FAILED = auto()


class RunningPlanner(Waking):
    """The first phase of a step: requests that run, in the order of their admission."""

    plans_steady = True
    """Whether a step comes back before the next is planned, so that decodes may be steady."""

    def _schedule_steady(self, plan: StepPlan) -> None:
        """One token for each steady decode, unless some of them would have to give way."""
        steady = self._steady
        if self._in_flight is not None or self.num_lookahead_tokens:
            steady.clear(self.running)
            return
        requests = steady.refresh(self.running, only_first=not self.fair_prefill)
        if not requests:
            return
        try:
            done = steady.allocate(self.kv_cache_manager, plan.new_block_ids)
        except Exception:
            # Whose fault it is shows when each is looked at alone.
            done = False
        if not done:
            steady.clear(self.running)
            return
        plan.steady = steady
        plan.num_scheduled = steady.one_each.copy()
        plan.token_budget -= len(requests)
        if self.running[len(requests) - 1] is requests[-1]:
            plan.position = len(requests)

    def _schedule_running(self, plan: StepPlan) -> None:
        running = self.running
        lookahead = self.num_lookahead_tokens
        num_scheduled = plan.num_scheduled
        while plan.position < len(running) and plan.token_budget > 0:
            request = running[plan.position]
            if request.is_steady:
                plan.position += 1
                continue
            computed = request.num_computed_tokens
            count = request.num_tokens + len(request.spec_token_ids) - computed
            chunk: EncoderChunk | None = None
            try:
                if count != 1 or request.num_output_placeholders or computed < request.media_end:
                    count += request.num_output_placeholders
                    count = self._limit_running(request, count, plan)
                    if self.chunk_ends.block_size > 1:
                        count = self._round_chunk(request, computed, count, plan)
                    if count > 0 and computed < request.media_end:
                        chunk = self._plan_media(request, computed, count, plan)
                        count = chunk.num_new_tokens
                    if count <= 0:
                        if chunk is not None:
                            release_claims(request, chunk, self.encoder_cache_manager)
                        plan.position += 1
                        continue
                if computed + count + lookahead >= request.kv_event_tokens:
                    verdict = self._allocate_running(request, count, plan)
                    if verdict is Verdict.NO_ROOM:
                        break
                    if verdict is Verdict.FAILED:
                        continue
                num_scheduled[request.request_id] = count
                plan.token_budget -= count
                plan.running.append(request)
                if request.spec_token_ids:
                    self._schedule_drafts(request, count, plan)
                if chunk is not None:
                    self._commit_media(request, chunk, plan)
            except Exception as error:
                self._fail_in_step(request, plan, error)
                continue
            plan.position += 1

    def _limit_running(self, request: Request, count: int, plan: StepPlan) -> int:
        """Cut the tokens that a running request wants to what it may have in this step."""
        computed = request.num_computed_tokens
        # Each step in flight brings one token at least.
        in_flight = request.num_output_placeholders - request.num_draft_placeholders
        if in_flight and request.num_tokens + in_flight >= request.total_token_limit:
            # What is under way reaches the end.
            return 0
        if request.num_tokens - computed > 1:
            count = self._limit_prefill(request, computed, count, plan)
        else:
            threshold = self._token_threshold()
            if threshold:
                count = min(count, threshold)
            if plan.draft_share is not None and request.spec_token_ids:
                behind = len(self.running) - plan.position - 1
                count = min(count, 1 + plan.draft_share, max(plan.token_budget - behind, 1))
        # The last position of a context is sampled into, never computed from.
        last = self.max_model_len - (request.sampling_params is not None)
        return min(count, plan.token_budget, last - computed)

    def _limit_prefill(self, request: Request, computed: int, count: int, plan: StepPlan) -> int:
        """Cut a chunk behind `computed` tokens to the long-prefill threshold and the fair share."""
        at_least = self._unsplittable(request, computed)
        threshold = self._token_threshold()
        if 0 < threshold < count:
            count = min(max(threshold, at_least), count)
        if self.fair_prefill and count > 1:
            share = self._share_for(request, plan)
            if share is not None and share < count:
                plan.shortened[request.request_id] = count
                count = min(max(share, at_least), count)
        return count

    def _unsplittable(self, request: Request, computed: int) -> int:
        """Tokens of a media item that begins here or has begun, if it may not be split: it must fit
        into the chunk, whatever its length."""
        if computed < request.media_end and (
            self.config.scheduler_config.disable_chunked_mm_input and not self.is_encoder_decoder
        ):
            for feature in request.mm_features:
                position = feature.mm_position
                if position.offset <= computed < position.offset + position.length:
                    return position.offset + position.length - computed
        return 0

    def _round_chunk(self, request: Request, computed: int, count: int, plan: StepPlan) -> int:
        """End a chunk where recurrent layers want it; 0: wait for a step with more room."""
        wanted = plan.shortened.get(request.request_id, count)
        threshold = self.config.scheduler_config.long_prefill_token_threshold
        decodes = len(self.running) - len(self._prefilling)
        reachable = self.max_num_scheduled_tokens - decodes
        if threshold:
            reachable = min(reachable, threshold)
        rounded = self.chunk_ends.round(
            request,
            computed,
            count,
            possible=min(wanted, plan.token_budget),
            reachable=reachable,
        )
        if rounded and self.config.scheduler_config.disable_chunked_mm_input:
            while rounded > 0 and request.is_inside_media(computed + rounded):
                rounded -= self.chunk_ends.block_size
            # An item that may not be split matters more than a state.
            return rounded if rounded > 0 else count
        return rounded

    def _round_before_media(self, computed: int, count: int) -> int:
        """End a chunk that media cut at the last border, if there is one in it."""
        end = (computed + count) // self.chunk_ends.block_size * self.chunk_ends.block_size
        return end - computed if end > computed else count

    def _token_threshold(self) -> int:
        """Most tokens for one request in this step; 0: no limit."""
        threshold = self.config.scheduler_config.long_prefill_token_threshold
        if self.fair_prefill and len(self.requests) == 1:
            return 0
        return threshold

    def _share_for(self, request: Request, plan: StepPlan) -> int | None:
        """Most prompt tokens for `request`, so that others as urgent get their part."""
        urgency = request.priority
        if urgency not in plan.share_of:
            plan.share_of[urgency] = self._fair_share(urgency)
        return plan.share_of[urgency]

    def _fair_share(self, urgency: int) -> int | None:
        threshold = self.config.scheduler_config.long_prefill_token_threshold
        sharing = [r for r in self._prefilling.values() if r.priority <= urgency]
        places = min(
            MAX_SHARING_PREFILLS - len(sharing), self.max_num_running_reqs - len(self.running)
        )
        if places > 0:
            sharing += [
                r
                for r in self.waiting.first(places)
                if r.awaits_admission and r.priority <= urgency
            ]
        wants = [r.num_tokens - r.num_computed_tokens for r in sharing[:MAX_SHARING_PREFILLS]]
        if threshold and len(wants) > 1:
            wants = [min(want, threshold) for want in wants]
        decodes = len(self.running) - len(self._prefilling)
        return fair_share(wants, self.max_num_scheduled_tokens - decodes)

    def _draft_share(self) -> int | None:
        """Drafts for each request when not all fit, after one token for everybody."""
        wanted = [len(r.spec_token_ids) for r in self.running]
        room = self.max_num_scheduled_tokens - len(wanted)
        if sum(wanted) <= room:
            return None
        drafting = sum(1 for count in wanted if count)
        return -(-max(room, 0) // drafting)

    def _schedule_drafts(self, request: Request, count: int, plan: StepPlan) -> None:
        """The drafts that the chunk has room for; the others are forgotten."""
        given = request.spec_token_ids
        known = request.num_tokens + request.num_output_placeholders
        fitting = count + request.num_computed_tokens - known
        if fitting > 0:
            plan.drafts[request.request_id] = given[:fitting]
        plan.given_drafts[request.request_id] = given
        request.spec_token_ids = []

    # -- blocks and preemption ----------------------------------------------------------------

    def _allocate_running(self, request: Request, count: int, plan: StepPlan) -> Verdict:
        """Blocks for `count` more tokens, at the cost of less urgent requests if need be.

        NO_ROOM: the request itself had to give way.
        """
        manager = self.kv_cache_manager
        while True:
            blocks = manager.allocate_slots(
                request,
                count,
                num_lookahead_tokens=self.num_lookahead_tokens,
                delay_cache_blocks=self._rests_on_loads(
                    request, request.num_computed_tokens, count, plan
                ),
            )
            if blocks is not None:
                break
            if self._reclaim_blocks():
                continue
            victim = self._choose_victim()
            if victim is request and len(self.running) == 1 and not self._others_hold_blocks():
                self._undo_media(request, plan)
                self._fail(request, self._too_long_message(request))
                return Verdict.FAILED
            self._take_from_running(victim, plan)
            if victim is request:
                return Verdict.NO_ROOM
        request.kv_event_tokens = manager.next_event_tokens(request.request_id)
        plan.add_block_ids(request.request_id, blocks.get_block_ids(allow_none=True))
        return Verdict.SCHEDULED

    def _fail_in_step(self, request: Request, plan: StepPlan, error: Exception) -> None:
        """End a request whose planning raised; the step goes on without it."""
        plan.remove(request)
        self._undo_media(request, plan)
        self._fail_with(request, error)

    def _choose_victim(self) -> Request:
        if self.policy == "priority":
            return max(self.running)
        return self.running[-1]

    def _take_from_running(self, victim: Request, plan: StepPlan) -> None:
        """Preempt a running request, undoing what this step had already given it."""
        index = self.running.index(victim)
        del self.running[index]
        if index < plan.position:
            plan.position -= 1
        # It may have taken over another's work before it had its own turn.
        self._undo_media(victim, plan)
        if victim.request_id in plan.num_scheduled:
            plan.remove(victim)
            self._evict_uncomputed(victim)
        self._preempt(victim, plan.timestamp)
        self.waiting.put_back([victim])
        plan.preempted.add(victim.request_id)

    def _displace(self, plan: StepPlan) -> None:
        """Preempt running requests for more urgent ones that find every place taken."""
        if not self.waiting.has_ready or len(self.running) < self.max_num_running_reqs:
            return
        if max(self.running).priority <= self.waiting.peek().priority:
            return
        victims = sorted(self.running, reverse=True)
        arrivals = [r for r in self.waiting.first(len(victims)) if r.awaits_admission]
        for victim, arrival in zip(victims, arrivals, strict=False):
            if arrival.priority >= victim.priority:
                break
            self._take_from_running(victim, plan)

    def _too_long_message(self, request: Request) -> str:
        blocks = self.kv_cache_config.num_blocks - 1
        return (
            f"The request needs KV for {request.num_tokens} tokens, more than all {blocks} blocks "
            "of the cache hold. Shorten it, or give the cache more memory."
        )

    # -- media --------------------------------------------------------------------------------

    def _plan_media(
        self, request: Request, computed: int, count: int, plan: StepPlan
    ) -> EncoderChunk:
        chunk = plan_encoder_chunk(
            request,
            computed,
            count,
            plan.encoder_budget,
            self.encoder_cache_manager,
            split_items=not self.config.scheduler_config.disable_chunked_mm_input,
            ec_connector=None if request.encodes_all else self.ec_connector,
            shift=self.drafter_shift,
            is_encoder_decoder=self.is_encoder_decoder,
        )
        if chunk.is_cut and self.chunk_ends.block_size > 1:
            rounded = self._round_before_media(computed, chunk.num_new_tokens)
            if not request.is_inside_media(computed + rounded):
                chunk.num_new_tokens = rounded
        plan.loading_outputs.update(request.mm_features[i].identifier for i in chunk.external)
        return chunk

    def _rests_on_loads(self, request: Request, computed: int, count: int, plan: StepPlan) -> bool:
        """Whether the KV of a chunk is wrong if a load of this step or of one under way fails.

        Then it must not be found before they are known to be good.
        """
        request_id = request.request_id
        if self.transfers.is_unconfirmed(request_id) or request_id in self._unproven:
            return True
        if not (plan.loading_outputs or self._loading_outputs) or computed >= request.media_end:
            return False
        loading = plan.loading_outputs | self._loading_outputs.keys()
        return self._reads_media(request, loading, computed, computed + count)

    def _commit_media(self, request: Request, chunk: EncoderChunk, plan: StepPlan) -> None:
        # The connector is told when nobody can be taken out of the step any more.
        commit(request, chunk, self.encoder_cache_manager)
        plan.encoder_budget -= sum(request.media_embeds[i] for i in chunk.inputs)
        self.encoder_cache_manager.count(
            hits=len(chunk.claimed) + len(chunk.repeated),
            loads=len(chunk.external),
            misses=len(chunk.inputs),
        )
        # Something may have been taken over while blocks were made free for this chunk.
        if chunk.external:
            add_inputs(plan.external_inputs, request.request_id, chunk.external)
        if chunk.inputs:
            add_inputs(plan.encoder_inputs, request.request_id, chunk.inputs)

    def _undo_media(self, victim: Request, plan: StepPlan) -> None:
        """Take a victim's encoder work out of the step; whoever counts on it takes over."""
        encoded = plan.encoder_inputs.pop(victim.request_id, [])
        loaded = plan.external_inputs.pop(victim.request_id, [])
        plan.encoder_budget += sum(victim.media_embeds[i] for i in encoded)
        from_elsewhere = {victim.mm_features[i].identifier for i in loaded}
        for identifier, (heir_id, input_id) in self.encoder_cache_manager.rollback(
            victim, encoded + loaded
        ):
            if identifier in from_elsewhere:
                add_inputs(plan.external_inputs, heir_id, [input_id])
            else:
                add_inputs(plan.encoder_inputs, heir_id, [input_id])
                plan.encoder_budget -= self.requests[heir_id].media_embeds[input_id]

    def _order_encoder_outputs(self, plan: StepPlan) -> None:
        """Tell the connector which encoder outputs the step loads."""
        assert self.ec_connector is not None
        told: set[EncoderInput] = set()
        # Whoever takes over from a request that fails here comes behind.
        while left := [
            (request_id, input_id)
            for request_id, input_ids in plan.external_inputs.items()
            for input_id in input_ids
            if (request_id, input_id) not in told
        ]:
            request_id, input_id = left[0]
            told.add((request_id, input_id))
            request = self.requests[request_id]
            try:
                self.ec_connector.update_state_after_alloc(request, input_id)
            except Exception as error:
                self._fail_in_step(request, plan, error)
