"""Which running requests want nothing but one more token, and what does a step do with them?

Most requests of most steps decode: one token in, one token out, no block border crossed, nothing
else to tell. They are kept in one list and taken through a step by tight loops over it, while
whatever happens to a request (a block border, a stop, drafts, a preemption) goes the general way.
Nothing here decides anything that the general way would decide otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import dropwhile

from jubako.kv_cache import KVCacheManager
from jubako.scheduler.engine_output import EngineCoreOutput
from jubako.scheduler.model_output import ModelRunnerOutput
from jubako.scheduler.output import BlockIds
from jubako.scheduler.request import Request, RequestStatus


class SteadyDecodes:
    """The running requests that are one token behind, in the order of `running`.

    `Request.is_steady` marks them. Each of them took part in the last step. As all advance by one
    token a step, whatever will happen to one of them is known by the number of the step: nobody
    looks at a request before. Then it is either in the calendar, or its tables are due.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.request_ids: list[str] = []
        self.computed_counts: list[int] = []
        """Tokens with KV before the step that is planned."""
        self.output_counts: list[int] = []
        """Generated tokens before that step."""
        self._token_counts: list[int] = []
        """Known tokens. As all of them get KV in the next step, the numbers are then those of
        `computed_counts`, and are not made again."""
        self.client_index: int | None = None
        """The front end of all of them, if it is one."""
        self.one_each: dict[str, int] = {}
        """One token for each request id; copying it is cheaper than making it."""
        self._places: dict[Request, int] = {}
        self._token_lists: list[list[int]] = []
        self._cached_counts: list[int] = []
        self._clients: set[int] = set()
        self._is_stale = False
        """Whether requests have joined or left since the lists were made."""
        self._has_left = False
        self._num_steps = 0
        self._calendar = _Calendar()
        self._tables_due: dict[Request, None] = {}
        """Requests whose tables must be looked at before their next token."""
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
            self.note_next_event(request)
            for token_id in request.ending_token_ids:
                self._stop_ids[token_id] = self._stop_ids.get(token_id, 0) + 1

    def leave(self, request: Request) -> None:
        """The request is not to be served here any more."""
        if not request.is_steady:
            return
        request.is_steady = False
        self._is_stale = self._has_left = True
        self._calendar.remove(request)
        self._tables_due.pop(request, None)
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
        if not self._is_stale:
            return self.requests
        start = len(self.requests)
        if self._has_left or (start and running[start - 1] is not self.requests[-1]):
            # Whoever joins may stand before some that are here already.
            start = 0
            self._empty()
        joining = running[start:]
        if only_first:
            for request in dropwhile(_is_steady, joining):
                self.leave(request)
        joining = [request for request in joining if request.is_steady]
        self._join(joining)
        self._is_stale = self._has_left = False
        return self.requests

    def _empty(self) -> None:
        self.requests, self.request_ids = [], []
        self.computed_counts, self.output_counts, self._token_counts = [], [], []
        self.one_each, self._places = {}, {}
        self._token_lists, self._cached_counts = [], []
        self._clients = set()

    def _join(self, joining: list[Request]) -> None:
        # Steps under way have the lists of requests as they were.
        self.requests = self.requests + joining
        joining_ids = [request.request_id for request in joining]
        self.request_ids = self.request_ids + joining_ids
        self.one_each |= dict.fromkeys(joining_ids, 1)
        self._places |= {request: place for place, request in enumerate(joining, len(self._places))}
        self._token_lists += [request.all_token_ids for request in joining]
        computed = [request.num_computed_tokens for request in joining]
        self.computed_counts = self.computed_counts + computed
        self._token_counts = self._token_counts + [request.num_tokens for request in joining]
        self.output_counts = self.output_counts + [
            count - request.num_prompt_tokens + 1 for count, request in zip(computed, joining)
        ]
        self._cached_counts += [request.num_cached_tokens for request in joining]
        self._clients |= {request.client_index for request in joining}
        self.client_index = next(iter(self._clients)) if len(self._clients) == 1 else None

    # -- a step -------------------------------------------------------------------------------

    def allocate(self, manager: KVCacheManager, new_block_ids: dict[str, BlockIds]) -> bool:
        """Blocks for one more token each, noted by request id; whether all got theirs."""
        if self._tables_due:
            # Blocks are handed out in the order of the batch.
            due = sorted(self._tables_due, key=self._places.__getitem__)
            events = manager.grow_decodes(due, new_block_ids)
            if events is None:
                return False
            self._tables_due.clear()
            for request, event in zip(due, events):
                request.kv_event_tokens = event
                self.note_next_event(request)
        return True

    def advance(self) -> None:
        """The planned step computes a token of each request."""
        self.computed_counts = counts = self._token_counts
        for request, count in zip(self.requests, counts):
            request.num_computed_tokens = count
        self.output_counts = [count + 1 for count in self.output_counts]
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
        # `map` makes no Python frame for each request.
        deque(map(list.append, self._token_lists, token_ids), maxlen=0)
        requests = self.requests
        self._token_counts = counts = [count + 1 for count in self.computed_counts]
        for request, count in zip(requests, counts):
            request.num_tokens = count
        outputs = list(map(EngineCoreOutput, self.request_ids, rows, self._cached_counts))
        places = self._places
        eventful: dict[int, Request] = {}
        for request in self._calendar.due(self._num_steps):
            num_tokens = request.num_tokens
            if num_tokens >= request.tokens_to_next_hash or num_tokens >= request.total_token_limit:
                eventful[places[request]] = request
            else:
                self._tables_due[request] = None
        stops = self._stop_ids.keys()
        if stops and not stops.isdisjoint(token_ids):
            for place, token_id in enumerate(token_ids):
                if token_id in stops:
                    eventful[place] = requests[place]
        return outputs, sorted(eventful.items())

    # -- what will happen ---------------------------------------------------------------------

    def note_next_event(self, request: Request) -> None:
        """With one of the next tokens it fills a block of hashes, is as long as it may be, or needs
        a slot for token `kv_event_tokens`, for which its tables are due."""
        num_tokens = request.num_tokens
        event = request.kv_event_tokens
        if event <= num_tokens:
            self._calendar.remove(request)
            self._tables_due[request] = None
            return
        # Comparing twice costs half of `min`.
        if request.tokens_to_next_hash < event:
            event = request.tokens_to_next_hash
        if request.total_token_limit < event:
            event = request.total_token_limit
        self._calendar.add(request, self._num_steps + event - num_tokens)


class _Calendar:
    """What is due in which step; each request has one entry at most, where its `due_step` says."""

    def __init__(self) -> None:
        self._requests: dict[int, dict[Request, None]] = {}

    def add(self, request: Request, step: int) -> None:
        """Enter a request, in place of the entry that it may have."""
        if request.due_step is not None:
            self.remove(request)
        request.due_step = step
        at_step = self._requests.get(step)
        if at_step is None:
            self._requests[step] = {request: None}
        else:
            at_step[request] = None

    def remove(self, request: Request) -> None:
        """Take out the entry of a request, if it has one."""
        step = request.due_step
        if step is not None:
            request.due_step = None
            at_step = self._requests[step]
            del at_step[request]
            if not at_step:
                del self._requests[step]

    def due(self, step: int) -> Iterable[Request]:
        """Take out the entries of one step."""
        requests = self._requests.pop(step, ())
        for request in requests:
            request.due_step = None
        return requests


def _is_steady(request: Request) -> bool:
    return request.is_steady
