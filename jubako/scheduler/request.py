"""What does the scheduler know about one request, and in which state is it?"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from typing import Any

from jubako.kv_cache import BlockHash
from jubako.kv_cache.request_hashing import RequestBlockHasher
from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler.engine_output import EngineCoreEvent, EngineCoreEventType, FinishReason
from jubako.scheduler.features import LoRARequest, MultiModalFeatureSpec

UNLIMITED_TOKENS = 2**62
"""A length that no request reaches."""


class RequestStatus(IntEnum):
    """The life of a request. Everything after `PREEMPTED` is finished."""

    WAITING = auto()
    WAITING_FOR_FSM = auto()
    """Its grammar is being compiled."""
    WAITING_FOR_REMOTE_KVS = auto()
    """Its KV is being loaded from elsewhere; it holds blocks."""
    WAITING_FOR_REMOTE_EC = auto()
    """An encoder output is being loaded from elsewhere."""
    WAITING_FOR_STREAMING_REQ = auto()
    """The next piece of its input has not come yet; it holds blocks."""
    RUNNING = auto()
    PREEMPTED = auto()
    """It ran and gave its blocks back; it waits to be computed again."""
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_IGNORED = auto()
    FINISHED_ERROR = auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class Request:
    """A request inside the engine core.

    `all_token_ids` is the prompt followed by the output; a prompt of embeddings counts as zeros
    there. `num_computed_tokens` is how many of them have KV that is written or scheduled to be.
    `block_hashes` names the full blocks of `all_token_ids` and grows as blocks fill, if a
    `block_hasher` (see `jubako.kv_cache.get_request_block_hasher`) is given, here or by the
    scheduler.

    Exactly one of `sampling_params` and `pooling_params` is set. `arrival_time` is wall clock in
    seconds, `priority` is sooner when lower.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hasher",
        "block_hashes",
        "cache_salt",
        "client_index",
        "drop_stale_tokens",
        "due_step",
        "encodes_all",
        "ending_token_ids",
        "eos_token_id",
        "events",
        "hash_block_size",
        "is_plain",
        "is_prefill_chunk",
        "is_steady",
        "kv_event_tokens",
        "kv_transfer_params",
        "lora_request",
        "max_tokens",
        "media_embeds",
        "media_end",
        "mm_features",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_placeholders",
        "num_external_computed_tokens",
        "num_failed_loads",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_tokens",
        "num_tokens",
        "pending_pieces",
        "pooling_params",
        "priority",
        "prompt_embeds",
        "prompt_token_ids",
        "request_id",
        "resumable",
        "sampling_params",
        "seed",
        "shared_prefix_tokens",
        "skip_reading_prefix_cache",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
        "structured_output",
        "tokens_to_next_hash",
        "total_token_limit",
        "trace_headers",
        "uses_grammar",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None,
        sampling_params: SamplingParams | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        eos_token_id: int | None = None,
        arrival_time: float | None = None,
        client_index: int = 0,
        mm_features: list[MultiModalFeatureSpec] | None = None,
        prompt_embeds: Any = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        resumable: bool = False,
        block_hasher: RequestBlockHasher | None = None,
        seed: int | None = None,
    ) -> None:
        if sampling_params is None and pooling_params is None:
            sampling_params = SamplingParams()
        params = sampling_params if pooling_params is None else pooling_params
        assert params is not None
        self.request_id = request_id
        self.client_index = client_index
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.priority = priority
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.trace_headers = trace_headers
        self.resumable = resumable
        self.mm_features = mm_features or []
        self.media_embeds = [_num_embeds(feature) for feature in self.mm_features]
        """Encoder outputs of each media item, in embeddings."""
        self.media_end = max(
            (f.mm_position.offset + f.mm_position.length for f in self.mm_features), default=0
        )
        """Prompt position behind the last media item."""
        self.prompt_embeds = prompt_embeds
        self.eos_token_id = eos_token_id
        self.skip_reading_prefix_cache = bool(params.skip_reading_prefix_cache)
        if sampling_params is not None and sampling_params.prompt_logprobs is not None:
            # Whatever was asked for: a position that is not computed has no logits to score.
            self.skip_reading_prefix_cache = True

        self.prompt_token_ids = None if prompt_token_ids is None else list(prompt_token_ids)
        if self.prompt_token_ids is not None:
            self.all_token_ids = self.prompt_token_ids.copy()
        else:
            self.all_token_ids = [0] * (0 if prompt_embeds is None else len(prompt_embeds))
        self.num_prompt_tokens = self.num_tokens = len(self.all_token_ids)

        self.kv_transfer_params: dict[str, Any] | None = None
        if pooling_params is not None or sampling_params is None:
            self.max_tokens: int | None = 1
            self.stop_token_ids: frozenset[int] = frozenset()
            self.seed = None
        else:
            self.max_tokens = sampling_params.max_tokens
            self.stop_token_ids = frozenset(sampling_params.stop_ids)
            self.seed = seed if sampling_params.seed is None else sampling_params.seed
            if sampling_params.extra_args:
                self.kv_transfer_params = sampling_params.extra_args.get("kv_transfer_params")
        self.total_token_limit = UNLIMITED_TOKENS
        """Tokens at which it ends; the scheduler lowers it to the longest context."""
        if self.max_tokens is not None:
            self.total_token_limit = self.num_prompt_tokens + self.max_tokens

        self.structured_output: Any = None
        self.uses_grammar = (
            sampling_params is not None and sampling_params.structured_outputs is not None
        )
        self.is_plain = (
            sampling_params is not None
            and sampling_params.logprobs is None
            and not self.uses_grammar
            and trace_headers is None
            and not resumable
        )
        """Whether nothing but tokens is told of it."""
        self.ending_token_ids = self.stop_token_ids
        """Tokens that may end it."""
        if eos_token_id is not None:
            self.ending_token_ids |= {eos_token_id}
        self.status = RequestStatus.WAITING_FOR_FSM if self.uses_grammar else RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []

        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        """Prefix hits when it was first scheduled; -1 until then."""
        self.num_external_computed_tokens = 0
        self.num_preemptions = 0
        self.is_prefill_chunk = False
        """Whether the last scheduled chunk ends before the last known token."""
        self.spec_token_ids: list[int] = []
        self.num_overtaken = 0
        """Later requests that were admitted while this one did not fit."""
        self.kv_event_tokens = 0
        """Below this many tokens its block tables need no attention; see `KVCacheManager`."""

        self.num_failed_loads = 0
        """Loads of its KV that failed; after one it is computed here."""
        self.encodes_all = False
        """Whether its media are encoded here, whoever offers them."""
        self.shared_prefix_tokens = 0
        """Tokens that others have begun with too; recurrent states are worth keeping there."""
        self.pending_pieces: deque[Request | None] | None = None
        """Of a session, input that has come and is not applied yet; None: the session ends."""

        self.is_steady = False
        """Whether it is served among the steady decodes."""
        self.due_step: int | None = None
        """The step before which nothing but a token happens to it there."""

        self.num_output_placeholders = 0
        """Output tokens that steps in flight will bring, if all their drafts are accepted
        (asynchronous scheduling)."""
        self.num_draft_placeholders = 0
        """Of those, the drafts."""
        self.num_in_flight_tokens = 0
        """Scheduled tokens whose step has not come back."""
        self.num_stale_tokens = 0
        """Of those, scheduled before the last preemption."""
        self.drop_stale_tokens = False
        """Whether what stale tokens bring is thrown away."""

        self.block_hashes: list[BlockHash] = []
        self.hash_block_size = 1
        self.tokens_to_next_hash = UNLIMITED_TOKENS
        self.block_hasher: RequestBlockHasher | None = None
        if block_hasher is not None:
            self.attach_block_hasher(block_hasher)

    # -- tokens -------------------------------------------------------------------------------

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """All known tokens and the drafts behind them."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.all_token_ids[self.num_prompt_tokens :]

    def is_inside_media(self, position: int) -> bool:
        """Whether a chunk that ends before `position` splits a media item."""
        return position < self.media_end and any(
            f.mm_position.offset < position < f.mm_position.offset + f.mm_position.length
            for f in self.mm_features
        )

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Add generated tokens, and the hashes of the blocks that they fill."""
        if isinstance(token_ids, int):
            self.all_token_ids.append(token_ids)
            self.num_tokens += 1
        else:
            self.all_token_ids.extend(token_ids)
            self.num_tokens = len(self.all_token_ids)
        if self.num_tokens >= self.tokens_to_next_hash:
            self.extend_block_hashes()

    def take_params_of(self, piece: Request) -> None:
        """Answer the known tokens as another request's parameters want it."""
        params = piece.sampling_params
        assert params is not None
        self.sampling_params = params
        self.max_tokens = piece.max_tokens
        self.eos_token_id = piece.eos_token_id
        self.stop_token_ids = piece.stop_token_ids
        self.ending_token_ids = piece.ending_token_ids
        self.stop_reason = None
        if params.seed is not None:
            self.seed = params.seed
        self.total_token_limit = UNLIMITED_TOKENS
        if self.max_tokens is not None:
            self.total_token_limit = self.num_tokens + self.max_tokens

    # -- block hashes -------------------------------------------------------------------------

    def attach_block_hasher(
        self, block_hasher: RequestBlockHasher, hash_block_size: int = 1
    ) -> None:
        """Name the blocks from now on with `block_hasher`.

        `hash_block_size` tokens fill a block; when it is not known, the hasher is asked after every
        token.
        """
        self.block_hasher = block_hasher
        self.set_hash_block_size(hash_block_size)
        self.extend_block_hashes()

    def set_hash_block_size(self, hash_block_size: int) -> None:
        """Ask the hasher only when a block of `hash_block_size` tokens has filled."""
        self.hash_block_size = hash_block_size
        self.tokens_to_next_hash = (self.num_tokens // hash_block_size + 1) * hash_block_size

    def extend_block_hashes(self) -> None:
        """Name the blocks that have filled."""
        assert self.block_hasher is not None
        self.block_hashes.extend(self.block_hasher(self))
        self.tokens_to_next_hash = (
            self.num_tokens // self.hash_block_size + 1
        ) * self.hash_block_size

    # -- state --------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it lives."""
        return self.status.finish_reason

    @property
    def awaits_admission(self) -> bool:
        """Whether it would be admitted, for the first time or again, by its next allocation."""
        return self.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def record_event(self, type: EngineCoreEventType, timestamp: float | None = None) -> None:
        """Note a station, for the next output."""
        self.events.append(EngineCoreEvent.new(type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """The stations since the last output, or None."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    @property
    def order_key(self) -> tuple[int, float, str]:
        """Sorts requests by urgency."""
        return (self.priority, self.arrival_time, self.request_id)

    def __lt__(self, other: Request) -> bool:
        return self.order_key < other.order_key

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


def _num_embeds(feature: MultiModalFeatureSpec) -> int:
    position = feature.mm_position
    return position.length if position.is_embed is None else sum(position.is_embed)
