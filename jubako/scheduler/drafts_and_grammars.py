"""Which drafts does the next step verify, and which tokens do grammars allow in it?"""

from __future__ import annotations

import numpy as np

from jubako.scheduler.ends import Ends
from jubako.scheduler.model_output import DraftTokenIds
from jubako.scheduler.output import GrammarOutput, SchedulerOutput
from jubako.scheduler.protocols import StructuredOutputManager
from jubako.scheduler.request import Request, RequestStatus


class DraftsAndGrammars(Ends):
    """What a step is told between planning and sampling, about each request by itself."""

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
                try:
                    drafts = self.structured_output_manager.validate_drafts(request, drafts)
                except Exception as error:
                    self._fail_with(request, error)
                    continue
            request.spec_token_ids = list(drafts)
            if drafts:
                self._steady.leave(request)
            self._has_drafts = self._has_drafts or bool(drafts)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """The token masks of this step, or None if no request in it has a grammar."""
        manager = self.structured_output_manager
        if manager is None or not scheduler_output.has_structured_output_requests:
            return None
        requests = [
            request
            for request_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(request_id)) is not None
            and request.uses_grammar
            and not request.is_prefill_chunk
        ]
        if not requests:
            return None
        return self._fill_bitmask(manager, requests, scheduler_output)

    def _fill_bitmask(
        self,
        manager: StructuredOutputManager,
        requests: list[Request],
        scheduler_output: SchedulerOutput,
    ) -> GrammarOutput | None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        try:
            bitmask = manager.grammar_bitmask(requests, drafts)
        except Exception as error:
            if len(requests) == 1:
                self._fail_with(requests[0], error)
                return None
            # Whose fault it is shows when each is asked for alone.
            parts = [self._fill_bitmask(manager, [r], scheduler_output) for r in requests]
            good = [part for part in parts if part is not None]
            if not good:
                return None
            return GrammarOutput(
                structured_output_request_ids=[
                    request_id for part in good for request_id in part.structured_output_request_ids
                ],
                grammar_bitmask=np.concatenate([part.grammar_bitmask for part in good]),
            )
        return GrammarOutput(
            structured_output_request_ids=[request.request_id for request in requests],
            grammar_bitmask=bitmask,
        )
