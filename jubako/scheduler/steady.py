"""Which running requests want nothing but one more token, and what does a step do with them?

Most requests of most steps decode: one token in, one token out, no block border crossed, nothing
else to tell. They are kept in one list and taken through a step by tight loops over it, while
whatever happens to a request (a block border, a stop, drafts, a preemption) goes the general way.
Nothing here decides anything that the general way would decide otherwise.
"""

from __future__ import annotations

from itertools import repeat, takewhile
from operator import sub

from jubako.kv_cache import KVCacheManager
from jubako.scheduler.engine_output import EngineCoreOutput
from jubako.scheduler.model_output import ModelRunnerOutput
from jubako.scheduler.output import BlockIds
from jubako.scheduler.request import Request, RequestStatus

_NONES = (repeat(None),) * 8


class SteadyDecodes:
    """The running requests that are one token behind, in the order of `running`.

    `Request.is_steady` marks them. Each of them took part in the last step. As all advance by one
    token a step, whatever will happen to one of them is known by the number of the step: nobody
    looks at a request before.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.request_ids: list[str] = []
        self.computed_counts: list[int] = []
        """Tokens with KV before the step that is planned."""
        self.output_counts: list[int] = []
        """Generated tokens before that step."""
        self.client_index: int | None = None
        """The front end of all of them, if it is one."""
        self._prompt_counts: list[int] = []
        """Prompt tokens, less the one that has no KV yet."""
        self._cached_counts: list[int] = []
        self._is_stale = False
        self._num_steps = 0
        self._kv_events = _Calendar()
        self._token_events = _Calendar()
        self._stop_ids: dict[int, int] = {}
        """Tokens that may end one of the requests, and how many requests they may end."""

    # -- who belongs --------------------------------------------------------------------------

    def consider(self, request: Request) -> None:
        """Take in a request that has just got a token, if it fits."""
        if (
            request.is_plain
            and not request.is_steady
            and request.num_computed_tokens == request.num_tokens - 1
            and request.status is RequestStatus.RUNNING
            and not request.spec_token_ids
            and not request.num_output_placeholders
            and request.media_end < request.num_tokens
            and not request.events
        ):
            request.is_steady = True
            self._is_stale = True
            self._note_kv_event(request)
            self.note_token_event(request)
            for token_id in request.ending_token_ids:
                self._stop_ids[token_id] = self._stop_ids.get(token_id, 0) + 1

    def leave(self, request: Request) -> None:
        """The request is not to be served here any more."""
        if not request.is_steady:
            return
        request.is_steady = False
        self._is_stale = True
        self._kv_events.remove(request)
        self._token_events.remove(request)
        for token_id in request.ending_token_ids:
            count = self._stop_ids[token_id] - 1
            if count:
                self._stop_ids[token_id] = count
            else:
                del self._stop_ids[token_id]

    def clear(self, running: list[Request]) -> None:
        """All requests leave."""
        if not self.requests and not self._is_stale:
            return
        for request in running:
            self.leave(request)
        self.refresh(running, only_first=False)

    def refresh(self, running: list[Request], only_first: bool) -> list[Request]:
        """The requests now. With `only_first`, only those that stand before all others."""
        if self._is_stale:
            steady = [request for request in running if request.is_steady]
            if only_first:
                for request in steady[len(list(takewhile(_is_steady, running))) :]:
                    self.leave(request)
                steady = [request for request in steady if request.is_steady]
            self.requests = steady
            self.request_ids = [request.request_id for request in steady]
            self.computed_counts = [request.num_computed_tokens for request in steady]
            self._prompt_counts = [request.num_prompt_tokens - 1 for request in steady]
            self._cached_counts = [request.num_cached_tokens for request in steady]
            clients = {request.client_index for request in steady}
            self.client_index = clients.pop() if len(clients) == 1 else None
            self._is_stale = False
        return self.requests

    # -- a step -------------------------------------------------------------------------------

    def allocate(self, manager: KVCacheManager, new_block_ids: dict[str, BlockIds]) -> bool:
        """Blocks for one more token each, noted by request id; whether all got theirs."""
        due = self._kv_events.due(self._num_steps)
        if due:
            if len(due) > 1:
                # Blocks are handed out in the order of the batch.
                entered = set(due)
                due = [request for request in self.requests if request in entered]
            if not manager.grow_decodes(due, new_block_ids):
                return False
            for request in due:
                request.kv_event_tokens = manager.next_event_tokens(request.request_id)
                self._note_kv_event(request)
        self.output_counts = list(map(sub, self.computed_counts, self._prompt_counts))
        return True

    def advance(self) -> None:
        """The planned step computes a token of each request."""
        counts = [count + 1 for count in self.computed_counts]
        for request, count in zip(self.requests, counts):
            request.num_computed_tokens = count
        self.computed_counts = counts
        self._num_steps += 1

    def append(
        self, result: ModelRunnerOutput
    ) -> tuple[list[EngineCoreOutput], list[tuple[int, Request]]] | None:
        """Append the token that each request got.

        Their outputs, and the requests to which more happens than a token, with their place among
        the outputs. None, with nothing changed, if some request did not get exactly one token.
        """
        rows = result.sampled_token_ids
        try:
            if result.req_ids != self.request_ids:
                index = result.req_id_to_index
                rows = [rows[index[request_id]] for request_id in self.request_ids]
            token_ids = [token_id for (token_id,) in rows]
        except (KeyError, IndexError, ValueError):
            return None
        requests = self.requests
        for request, token_id, computed in zip(requests, token_ids, self.computed_counts):
            request.all_token_ids.append(token_id)
            request.num_tokens = computed + 1
        # Id, tokens, eight fields that are None, and the prefix hits; `map` makes no Python frame.
        outputs = list(map(EngineCoreOutput, self.request_ids, rows, *_NONES, self._cached_counts))
        eventful = set(self._token_events.due(self._num_steps))
        stops = self._stop_ids.keys()
        if not eventful and stops.isdisjoint(token_ids):
            return outputs, []
        return outputs, [
            (place, request)
            for place, (request, token_id) in enumerate(zip(requests, token_ids))
            if token_id in stops or request in eventful
        ]

    # -- what will happen ---------------------------------------------------------------------

    def _note_kv_event(self, request: Request) -> None:
        """Its tables are due when it needs a slot for token `kv_event_tokens`."""
        distance = max(request.kv_event_tokens - request.num_tokens, 0)
        self._kv_events.add(request, self._num_steps + distance)

    def note_token_event(self, request: Request) -> None:
        """It fills a block of hashes, or is as long as it may be, with one of the next tokens."""
        event = min(request.tokens_to_next_hash, request.total_token_limit)
        self._token_events.add(request, self._num_steps + event - request.num_tokens)


class _Calendar:
    """What is due in which step; each request has one entry."""

    def __init__(self) -> None:
        self._requests: dict[int, dict[Request, None]] = {}
        self._step_of: dict[Request, int] = {}

    def add(self, request: Request, step: int) -> None:
        """Enter a request, in place of the entry that it may have."""
        if request in self._step_of:
            self.remove(request)
        self._step_of[request] = step
        at_step = self._requests.get(step)
        if at_step is None:
            self._requests[step] = {request: None}
        else:
            at_step[request] = None

    def remove(self, request: Request) -> None:
        """Take out the entry of a request, if it has one."""
        step = self._step_of.pop(request, None)
        if step is not None:
            del self._requests[step][request]
            if not self._requests[step]:
                del self._requests[step]

    def due(self, step: int) -> list[Request]:
        """Take out the entries of one step."""
        requests = self._requests.pop(step, None)
        if requests is None:
            return []
        for request in requests:
            del self._step_of[request]
        return list(requests)


def _is_steady(request: Request) -> bool:
    return request.is_steady
