"""What becomes of requests whose KV or encoder outputs come from elsewhere, or do not come?

A load outside steps ends between steps: its request goes on with what has arrived. A load inside a
step ends with the step's output. Nothing that a load fills is findable before the workers have
reported it good. What did not arrive is computed here, from the last length that is intact, and the
request is not offered to the connector again; or the request ends, if that is the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jubako.scheduler.ends import Ends
from jubako.scheduler.model_output import KVConnectorOutput, ModelRunnerOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.step_plan import StepPlan
from jubako.scheduler.transfers import KVLoad

LOAD_FAILED = "The KV cache of the request could not be loaded; send the request again."


class LoadRecovery(Ends):
    """Follows loads to their end."""

    # -- what a step loads ----------------------------------------------------------------------

    def _note_loading_outputs(self, plan: StepPlan, output: SchedulerOutput) -> None:
        for identifier in self._identifiers(plan.external_inputs):
            self._loading_outputs[identifier] = output
        if self._loading_outputs:
            for identifier in self._identifiers(plan.encoder_inputs):
                # Whatever an earlier step fails to load is computed in this one.
                self._loading_outputs.pop(identifier, None)
            for request in (*plan.running, *plan.new, *plan.resumed):
                start = request.num_computed_tokens
                stop = start + plan.num_scheduled[request.request_id]
                if self._reads_media(request, self._loading_outputs.keys(), start, stop):
                    self._unproven[request.request_id] = output

    def _identifiers(self, inputs: dict[str, list[int]]) -> set[str]:
        return {
            self.requests[request_id].mm_features[input_id].identifier
            for request_id, input_ids in inputs.items()
            for input_id in input_ids
        }

    # -- reports, in the order in which a step's output is looked at --------------------------

    def _take_failures(self, step: SchedulerOutput, result: ModelRunnerOutput) -> set[str]:
        """What `step` was to load and did not get; ids of requests whose part in it is void."""
        void: set[str] = set()
        untold = [entry for entry in self._untold_outputs if entry[0] is step]
        if untold:
            self._untold_outputs = [e for e in self._untold_outputs if e[0] is not step]
            void = self._take_failed_outputs(untold[0][1], step)
        report = result.ec_connector_output
        if report is not None:
            void |= self._take_failed_outputs(set(report.failed_recving or ()), step)
            self._note(self.encoder_transfers.take_report(report))
        if self._loading_outputs:
            self._loading_outputs = {
                identifier: loading
                for identifier, loading in self._loading_outputs.items()
                if loading is not step
            }
        transfers = self.transfers
        if transfers.step_loads or result.kv_connector_output is not None:
            void |= self._take_failed_loads(result.kv_connector_output, step)
            self._confirm_step_loads(step)
        if self._unproven:
            self._confirm_outputs(step)
        return void

    def _take_failed_loads(
        self, report: KVConnectorOutput | None, step: SchedulerOutput
    ) -> set[str]:
        """What did not arrive; ids of requests whose part in `step` is void."""
        void = self._retreat_from_untold(step)
        if report is not None:
            void |= self._take_damage(report, step)
        return void

    def _retreat_from_untold(self, step: SchedulerOutput) -> set[str]:
        untold = [
            load
            for load in self.transfers.step_loads.values()
            if load.is_untold and load.step is step
        ]
        for load in untold:
            if self._fails_on_damage:
                self._fail(load.request, LOAD_FAILED)
            elif load.is_stale:
                load.request.drop_stale_tokens = load.request.num_stale_tokens > 0
            else:
                load.failed = True
                self._retreat(load, set())
        return {load.request.request_id for load in untold}

    def _take_failed_outputs(self, identifiers: Set[str], step: SchedulerOutput) -> set[str]:
        """Encoder outputs that `step` was to load and did not get; ids of requests that ran on
        them: their part in the step is void, and they encode."""
        failed = identifiers - self.encoder_cache_manager.loading
        if not failed:
            return set()
        void = set()
        for request_id, request in list(self.requests.items()):
            if failed.isdisjoint(feature.identifier for feature in request.mm_features):
                continue
            in_flight = request.num_in_flight_tokens
            in_flight = in_flight or step.num_scheduled_tokens.get(request_id, 0)
            if request.status is not RequestStatus.RUNNING:
                request.drop_stale_tokens = request.num_stale_tokens > 0
            elif self._reads_media(
                request,
                failed,
                request.num_computed_tokens - in_flight,
                request.num_computed_tokens,
            ):
                void.add(request_id)
                request.encodes_all = True
                start = max(request.num_computed_tokens - in_flight, 0)
                # Steps under way may have let go of what the first token of them reads.
                self._cut_back(request, self._intact_length(request, start, frozenset()), start)
        for identifier in failed:
            # A later step may have made it anew.
            if self._loading_outputs.get(identifier) is step:
                self.encoder_cache_manager.drop(identifier)
        return void

    def _reads_media(self, request: Request, identifiers: Set[str], start: int, stop: int) -> bool:
        """Whether some of these media stand in the request's tokens `[start, stop)`."""
        for feature in request.mm_features:
            first = feature.mm_position.offset
            end = first + feature.mm_position.length
            if feature.identifier in identifiers and first < stop and end > start:
                return True
        return False

    def _confirm_outputs(self, step: SchedulerOutput) -> None:
        """What `step` read has come: KV that was made from it may be found."""
        for request_id, last in list(self._unproven.items()):
            if last is step:
                del self._unproven[request_id]
                request = self.requests[request_id]
                computed = request.num_computed_tokens - request.num_output_placeholders
                self.kv_cache_manager.cache_blocks(request, min(computed, request.num_tokens))

    def _take_damage(self, report: KVConnectorOutput, step: SchedulerOutput) -> set[str]:
        transfers = self.transfers
        for request_id in report.failed_recving or ():
            load = transfers.loads.get(request_id)
            if load is not None:
                load.failed = True
                if self._fails_on_damage:
                    self._fail(load.request, LOAD_FAILED)
        invalid = report.invalid_block_ids
        if not invalid:
            return set()
        damaged: dict[KVLoad, set[int]] = {}
        known: set[int] = set()
        held: set[int] = set()
        loads = [
            *transfers.loads.values(),
            *(load for load in transfers.step_loads.values() if load.step is step),
        ]
        for load in loads:
            found = invalid & load.block_ids
            if found:
                damaged[load] = found
                known |= found
                # What its request has let go of since may hold another's good KV by now.
                if not load.is_stale:
                    held |= found & transfers.ids_of(load.request, load.num_tokens)
        transfers.num_unknown_reports += len(invalid) - len(known)
        void = {load.request.request_id for load in damaged if load.computed_to}
        shared = self._other_holders(held, {load.request.request_id for load in damaged})
        if self._fails_on_damage:
            affected = [load.request for load in damaged] + shared
            self.kv_cache_manager.evict_blocks(held)
            for request in affected:
                self._fail(request, LOAD_FAILED)
            return void
        for load, found in damaged.items():
            if load.is_stale:
                request = load.request
                request.drop_stale_tokens = request.num_stale_tokens > 0
                request.num_failed_loads += 1
            elif load.computed_to:
                self._retreat(load, found)
            else:
                load.damaged |= found
        for request in shared:
            intact = self._intact_length(request, request.num_computed_tokens, held)
            void.add(request.request_id)
            self._cut_back(request, intact, intact)
        self.kv_cache_manager.evict_blocks(held)
        return void

    def _confirm_step_loads(self, step: SchedulerOutput) -> None:
        """What `step` loaded and was not reported as damaged is good: now it may be found."""
        transfers = self.transfers
        for request_id, load in list(transfers.step_loads.items()):
            if load.step is step:
                self._end_load_of(request_id)
                request = load.request
                if request_id in self.requests and not load.is_stale:
                    # Less if the step is void for another reason.
                    good = min(load.computed_to, request.num_tokens, request.num_computed_tokens)
                    self.kv_cache_manager.cache_blocks(request, good)

    def _take_transfer_reports(self, report: KVConnectorOutput) -> None:
        """Completions; blocks of ended requests come free."""
        transfers = self.transfers
        transfers.update(report)
        completed = {*(report.finished_recving or ()), *(report.failed_recving or ())}
        for request_id in completed:
            load = transfers.loads.get(request_id)
            if load is None:
                transfers.release(request_id, "recv")
            elif not load.reported:
                load.reported = True
                self._woken[request_id] = None
        sent = {*(report.finished_sending or ()), *(report.failed_sending or ())}
        for request_id in sent:
            transfers.release(request_id, "send")
        if report.kv_connector_stats is not None:
            self._connector_stats = report.kv_connector_stats

    @property
    def _fails_on_damage(self) -> bool:
        return self.config.kv_transfer_config.kv_load_failure_policy == "fail"

    def _other_holders(self, block_ids: Set[int], owners: Set[str]) -> list[Request]:
        """Requests beside `owners` that hold some of the blocks."""
        blocks = self.kv_cache_manager.block_pool.blocks
        if all(blocks[block_id].ref_cnt <= 1 for block_id in block_ids):
            return []
        candidates: Iterable[Request] = [*self.running, *self._holders.values()]
        return [
            request
            for request in candidates
            if request.request_id not in owners
            and not block_ids.isdisjoint(
                self.transfers.ids_of(request, request.num_computed_tokens)
            )
        ]

    # -- going on, and going back -------------------------------------------------------------

    def _finish_load(self, load: KVLoad) -> None:
        """A load outside steps has been reported: its request waits for admission, with blocks."""
        request = load.request
        if load.failed and self._fails_on_damage:
            self._fail(request, LOAD_FAILED)
            return
        self._end_load_of(request.request_id)
        if load.failed or load.damaged:
            # Of a load that failed as a whole, nothing beyond the local tokens is trusted.
            arrived = load.num_local if load.failed else load.num_tokens
            length = self._intact_length(request, arrived, load.damaged)
            request.num_failed_loads += 1
        else:
            # The last token is computed here even if its KV came along: it makes the logits.
            length = min(load.num_tokens, request.num_tokens - 1)
        request.num_external_computed_tokens = max(min(length, load.num_tokens) - load.num_local, 0)
        self._keep_only(request, length)
        self.kv_cache_manager.cache_blocks(request, length)
        request.status = (
            RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        )

    def _retreat(self, load: KVLoad, damaged: Set[int]) -> None:
        """A step ran on blocks that had not arrived: its part for the request is void."""
        request = load.request
        arrived = load.num_local if load.failed else load.num_tokens
        length = self._intact_length(request, arrived, damaged)
        self._end_load_of(request.request_id)
        request.num_failed_loads += 1
        request.num_external_computed_tokens = max(length - load.num_local, 0)
        if request.num_cached_tokens == load.num_tokens and not request.num_preemptions:
            # It will have been fewer.
            request.num_cached_tokens = -1
        self._cut_back(request, length)
        self.kv_cache_manager.cache_blocks(request, length)

    def _intact_length(self, request: Request, num_tokens: int, damaged: Set[int]) -> int:
        """The most tokens, up to `num_tokens`, from which the request can go on."""
        if self.has_recurrent:
            return 0
        # The last token is computed in any case: it makes the logits.
        longest = min(num_tokens, request.num_tokens - 1)
        return self.kv_cache_manager.longest_intact_prefix(
            request.request_id, longest, damaged, self.block_size
        )

    def _cut_back(self, request: Request, length: int, good: int | None = None) -> None:
        """Take a request out of what it is doing; it goes on from `length` tokens.

        Its tokens in flight are void. Beyond `good` tokens its blocks are not to be found any more;
        None: they never were.
        """
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.waiting.put_back([request])
            self._cut_back_ids.add(request.request_id)
        self._leave_running(request)
        self.encoder_cache_manager.free(request)
        if good is not None:
            self.kv_cache_manager.evict_uncomputed_blocks(request.request_id, good)
        self._keep_only(request, length)
        if request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            request.status = RequestStatus.PREEMPTED
        self._void_tokens_in_flight(request)

    def _keep_only(self, request: Request, length: int) -> None:
        """Count `length` tokens as computed, and free the blocks of all others."""
        if length:
            if not self.has_recurrent:
                self.kv_cache_manager.truncate(request.request_id, length)
            self._holders[request.request_id] = request
        else:
            self.kv_cache_manager.free(request)
            self._holders.pop(request.request_id, None)
        request.num_computed_tokens = length

    # -- before a step ------------------------------------------------------------------------

    def _give_up_overdue_loads(self, now: float) -> None:
        """Cancel loads that nobody reports; give up those whose cancelling nobody reports."""
        for load in self.transfers.overdue(now):
            request = load.request
            if not load.is_cancelled:
                self.transfers.cancel(load, now)
                continue
            self._end_load_of(request.request_id)
            self.transfers.quarantine(request)
            if self._fails_on_damage:
                self._fail(request, LOAD_FAILED)
                continue
            request.num_failed_loads += 1
            request.status = (
                RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            )
            self.waiting.unblock(request)

    def _fail_untold_loads(self, requests: Iterable[Request]) -> None:
        """The workers will not hear of loads that this step was to begin."""
        for request in requests:
            load = self.transfers.loads.get(request.request_id)
            if load is not None:
                load.failed = load.reported = True
                self._woken[request.request_id] = None
            elif (load := self.transfers.step_loads.get(request.request_id)) is not None:
                load.is_untold = True
