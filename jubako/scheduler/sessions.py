"""What happens to a request whose input comes piece by piece?

A session is a resumable request. Its first piece is an ordinary prompt; when the answer to a piece
has ended, the next piece continues the prompt: what was answered becomes part of it, but for the
last token, which was sampled and never computed. A session without a next piece is parked with its
KV. A piece that is not resumable ends the session.
"""

from __future__ import annotations

from collections import deque

import msgspec

from jubako.errors import JubakoError, ValidationError
from jubako.scheduler.engine_output import EngineCoreEventType
from jubako.scheduler.limits import check_length, check_session
from jubako.scheduler.load_recovery import LoadRecovery
from jubako.scheduler.request import Request, RequestStatus


class Sessions(LoadRecovery):
    """Queues pieces, applies them in order, and parks sessions that have none."""

    def add_request(self, request: Request) -> None:
        """Queue a request, or the next piece of a session that has its id.

        Raises as for any request. A piece that cannot be taken ends its session with an error.
        """
        session = self.requests.get(request.request_id)
        if session is None or not session.resumable:
            super().add_request(request)
            return
        try:
            if request.resumable:
                check_session(request)
                if not request.num_tokens:
                    raise ValidationError("The piece of input is empty.", "prompt")
        except JubakoError as error:
            self._fail(session, error.message)
            return
        if session.pending_pieces is None:
            session.pending_pieces = deque()
        session.pending_pieces.append(request if request.resumable else None)
        if session.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._parked.discard(session.request_id)
            self._woken[session.request_id] = None

    def _end_turn(self, session: Request) -> bool:
        """The answer to a piece has ended. False if that was the last, and the session ends.

        A session that goes on stands in `waiting`, but not yet outside `running`.
        """
        if session.pending_pieces and session.pending_pieces[0] is None:
            return False
        if session in self.waiting:
            self.waiting.remove(session)
        self._leave_running(session)
        self._void_tokens_in_flight(session)
        self.encoder_cache_manager.free(session)
        self._keep_answer(session)
        session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self.waiting.add(session)
        self.waiting.block(session)
        if session.pending_pieces:
            self._woken[session.request_id] = None
        else:
            self._parked.add(session.request_id)
        return True

    def _keep_answer(self, session: Request) -> None:
        """Make the answer part of the prompt, but for the token that was never computed."""
        kept = session.num_tokens - 1
        del session.all_token_ids[kept:]
        session.num_tokens = session.num_prompt_tokens = kept
        session.prompt_token_ids = session.all_token_ids.copy()
        if session.block_hasher is not None:
            del session.block_hashes[kept // session.hash_block_size :]
            session.set_hash_block_size(session.hash_block_size)
        computed = session.num_computed_tokens
        if computed > kept:
            # What a step under way computes beyond is written again.
            computed = self._intact_length(session, kept, frozenset())
        self._keep_only(session, computed)

    def _continue_session(self, session: Request) -> None:
        """Apply the next piece of a parked session, or end it."""
        assert session.pending_pieces is not None
        piece = session.pending_pieces.popleft()
        if piece is None:
            self.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
            return
        check_length(session.num_tokens + piece.num_tokens, self.max_model_len)
        offset = session.num_tokens
        session.all_token_ids += piece.all_token_ids
        session.num_tokens = session.num_prompt_tokens = len(session.all_token_ids)
        session.prompt_token_ids = session.all_token_ids.copy()
        session.mm_features = session.mm_features + [
            msgspec.structs.replace(
                feature,
                mm_position=msgspec.structs.replace(
                    feature.mm_position, offset=feature.mm_position.offset + offset
                ),
            )
            for feature in piece.mm_features
        ]
        session.media_embeds = session.media_embeds + piece.media_embeds
        if piece.mm_features:
            session.media_end = piece.media_end + offset
        session.take_params_of(piece)
        session.total_token_limit = min(session.total_token_limit, self.max_model_len)
        session.arrival_time = piece.arrival_time
        if session.block_hasher is not None:
            session.extend_block_hashes()
        session.status = RequestStatus.WAITING
        # It queues up like anybody whose prompt arrived now.
        self.waiting.remove(session)
        self.waiting.add(session)
        if self.log_stats:
            session.record_event(EngineCoreEventType.QUEUED)
