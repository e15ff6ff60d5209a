"""What does the scheduler hold, and how does a request come and go?"""

from __future__ import annotations

import logging
import random
from collections.abc import Set
from math import lcm
from typing import Any

from jubako.config import JubakoConfig
from jubako.errors import ValidationError
from jubako.kv_cache import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheMetricsCollector,
    MambaSpec,
    get_hash_fn_by_name,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)
from jubako.scheduler.adapters import AdapterSlots
from jubako.scheduler.chunk_ends import ChunkEnds
from jubako.scheduler.encoder_cache import EncoderCacheManager
from jubako.scheduler.encoder_decoder_cache import EncoderDecoderCacheManager
from jubako.scheduler.encoder_transfers import EncoderTransfers
from jubako.scheduler.engine_output import (
    EngineCoreEventType,
    EngineCoreOutput,
    SpecDecodingStats,
)
from jubako.scheduler.limits import (
    DEFAULT_BLOCK_SIZE,
    check_hooks,
    check_options,
    check_request,
    resolve_max_model_len,
)
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.protocols import ECConnector, KVConnector, StructuredOutputManager
from jubako.scheduler.queue import RequestQueue, create_request_queue
from jubako.scheduler.request import Request, RequestStatus
from jubako.scheduler.steady import SteadyDecodes
from jubako.scheduler.transfers import KVTransfers

logger = logging.getLogger(__name__)


class SchedulerState:
    """Requests, their queues, and the account of their KV and encoder outputs.

    Of `config` only the scheduler and cache concerns need to be filled; without a `max_model_len`
    a request may grow as long as the cache. `block_size` and `hash_block_size` (tokens) follow from
    the KV cache groups unless they are given. Raises `ConfigError` for options that do not fit
    together.
    """

    def __init__(
        self,
        config: JubakoConfig,
        kv_cache_config: KVCacheConfig,
        *,
        block_size: int | None = None,
        hash_block_size: int | None = None,
        structured_output_manager: StructuredOutputManager | None = None,
        connector: KVConnector | None = None,
        ec_connector: ECConnector | None = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.config = config
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager = structured_output_manager
        self.connector = connector
        self.ec_connector = ec_connector
        self.log_stats = log_stats

        options = config.scheduler_config
        self.policy = options.scheduling_policy
        self.max_num_scheduled_tokens = options.token_budget
        self.max_num_running_reqs = options.seq_limit
        self.fair_prefill = options.fair_prefill and options.enable_chunked_prefill
        # Overtaking would let a less urgent request in before a more urgent one.
        self.admission_lookahead = 0 if self.policy == "priority" else options.admission_lookahead
        self.max_encoder_tokens = options.max_num_encoder_input_tokens or options.token_budget
        encoder_cache_size = options.encoder_cache_size or options.token_budget
        self.adapters = AdapterSlots(config.lora_config.max_loras)
        self.num_lookahead_tokens = 0
        """Slots behind a request's tokens that a drafter writes to."""
        self.drafter_shift = 0
        """How many positions further than the model a drafter reads embeddings."""
        self.num_spec_tokens = 0
        """Drafts that a request in flight is expected to bring (asynchronous scheduling)."""
        self.max_model_len = resolve_max_model_len(config, kv_cache_config)
        check_options(config, kv_cache_config, self.max_model_len)

        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.is_encoder_decoder = any(isinstance(spec, CrossAttentionSpec) for spec in specs)
        self.chunk_ends = ChunkEnds(specs)
        self.has_recurrent = any(isinstance(spec, MambaSpec) for spec in specs)
        check_hooks(connector, ec_connector, is_encoder_decoder=self.is_encoder_decoder)
        self._init_kv_cache(block_size, hash_block_size)
        self.encoder_cache_manager: EncoderCacheManager = (
            EncoderDecoderCacheManager(encoder_cache_size)
            if self.is_encoder_decoder
            else EncoderCacheManager(encoder_cache_size)
        )
        self.transfers = KVTransfers(
            connector,
            self.kv_cache_manager,
            config.kv_transfer_config,
            alignment=lcm(self.block_size, *(spec.block_size for spec in specs)),
            has_recurrent=self.has_recurrent,
            log_stats=log_stats,
        )
        self.encoder_transfers = EncoderTransfers(
            ec_connector, self.encoder_cache_manager, config.ec_transfer_config
        )

        self.requests: dict[str, Request] = {}
        """Every request that has not ended."""
        self.waiting: RequestQueue = create_request_queue(self.policy)
        self.running: list[Request] = []
        """In the order of admission."""
        self.finished_req_ids: set[str] = set()
        """Ended since the last step; the workers hear of them with the next."""
        self.prev_step_scheduled_req_ids: Set[str] = frozenset()
        self._steady = SteadyDecodes()
        self._in_flight: tuple[SchedulerOutput, list[Request]] | None = None
        """The last step until it comes back, and its steady decodes."""
        self._prefilling: dict[str, Request] = {}
        """Running requests whose last chunk ended before their last known token."""
        self._failed: list[tuple[int, EngineCoreOutput]] = []
        """Last outputs of requests that failed outside `update_from_output`."""
        self._finished_by_client: dict[int, set[str]] | None = {} if include_finished_set else None
        self.is_paused = False
        """Whether nothing is scheduled for now."""
        self._woken: dict[str, None] = {}
        """Blocked requests to which something has happened since the last step."""
        self._holders: dict[str, Request] = {}
        """Waiting requests that hold blocks with finished KV."""
        self._parked: set[str] = set()
        """Sessions that wait for the next piece of their input."""
        self._load_waiters: dict[str, list[Request]] = {}
        """Requests that wait for another's load, which brings the same blocks."""
        self._cut_back_ids: set[str] = set()
        """Requests whose last step was void; the workers hear of them with the next."""
        self._connector_stats: Any = None
        self._loading_outputs: dict[str, SchedulerOutput] = {}
        """Encoder outputs that steps under way load, and the last step that does."""
        self._unproven: dict[str, SchedulerOutput] = {}
        """Requests some of whose KV was made from these outputs, and the last step that did so."""
        self._untold_outputs: list[tuple[SchedulerOutput, set[str]]] = []
        """Encoder outputs that steps under way were to load, of which the workers never heard."""
        self._seeds = random.Random(config.model_config.seed)
        self._has_drafts = False
        self._num_preemptions = 0
        self._num_scheduled_tokens = 0
        self._step_counter = 0
        self._spec_decoding = SpecDecodingStats()

    def _init_kv_cache(self, block_size: int | None, hash_block_size: int | None) -> None:
        cache = self.config.cache_config
        groups = self.kv_cache_config.kv_cache_groups
        caching = cache.enable_prefix_caching
        if caching is None:
            caching = bool(groups) and not any(
                isinstance(g.kv_cache_spec, CrossAttentionSpec) for g in groups
            )
        changes: dict[str, Any] = {"enable_prefix_caching": caching}
        if cache.block_size is None:
            changes["block_size"] = DEFAULT_BLOCK_SIZE
        sizes = resolve_kv_cache_block_sizes(
            self.kv_cache_config, self.config.replace(cache_config=changes)
        )
        self.block_size = sizes[0] if block_size is None else block_size
        self.hash_block_size = sizes[1] if hash_block_size is None else hash_block_size
        self.enable_prefix_caching = caching
        self._kv_metrics = None
        if self.log_stats and cache.kv_cache_metrics:
            self._kv_metrics = KVCacheMetricsCollector(cache.kv_cache_metrics_sample)
        self.kv_cache_manager = KVCacheManager(
            self.kv_cache_config,
            self.max_model_len,
            self.hash_block_size,
            enable_caching=caching,
            log_stats=self.log_stats,
            enable_kv_cache_events=self.config.kv_events_config.enable_kv_cache_events,
            use_int_block_hashes=self.config.kv_events_config.use_int_block_hashes,
            metrics_collector=self._kv_metrics,
            scheduler_block_size=self.block_size,
            max_num_batched_tokens=self.max_num_scheduled_tokens,
            watermark=cache.watermark,
            # Memory that was just in use is warm, and on a CPU a page's first touch is dear.
            free_unhashed_first=True,
        )
        self.block_hasher = None
        if caching or self.connector is not None:
            self.block_hasher = get_request_block_hasher(
                self.hash_block_size, get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            )

    # -- arrivals -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises `ValidationError` or `NotImplementedFeatureError`, with nothing changed, for one that
        can never run: a known id, an empty or too long prompt, a priority where none is scheduled.
        """
        request_id = request.request_id
        if (
            request_id in self.requests
            or request_id in self.finished_req_ids
            or request_id in self.transfers.holds.of_request
        ):
            raise ValidationError(
                f"request_id {request_id!r} is in use; choose another.", "request_id", request_id
            )
        check_request(
            request,
            max_model_len=self.max_model_len,
            policy=self.policy,
            media_room=min(self.max_encoder_tokens, self.encoder_cache_manager.cache_size),
            whole_items_up_to=self._longest_whole_item,
            has_grammars=self.structured_output_manager is not None,
            is_encoder_decoder=self.is_encoder_decoder,
        )
        self._name_blocks(request)
        if request.sampling_params is not None and request.seed is None:
            request.seed = self._seeds.getrandbits(63)
        request.total_token_limit = min(request.total_token_limit, self.max_model_len)
        if self.is_encoder_decoder:
            # The encoder's input is wanted before the first token only, however long it is.
            request.media_end = min(request.media_end, 1)
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if not request.awaits_admission:
            # What it waits for may have come before it did.
            self.waiting.block(request)
            self._woken[request.request_id] = None
        self.adapters.arrive(request)
        self.transfers.new_request(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def _name_blocks(self, request: Request) -> None:
        if request.block_hasher is not None:
            request.set_hash_block_size(self.hash_block_size)
        elif self.block_hasher is not None:
            try:
                request.attach_block_hasher(self.block_hasher, self.hash_block_size)
            except (TypeError, ValueError, OverflowError, AttributeError) as error:
                request.block_hasher = None
                raise ValidationError(
                    f"The blocks of request {request.request_id!r} cannot be named ({error}): "
                    "token ids must be 32-bit integers, embeddings an array.",
                    "prompt",
                ) from error

    @property
    def _longest_whole_item(self) -> int | None:
        """Most positions of a media item that may not be split; None: items may be split."""
        splits = not self.config.scheduler_config.disable_chunked_mm_input
        return None if splits or self.is_encoder_decoder else self.max_num_scheduled_tokens

    # -- counts -------------------------------------------------------------------------------

    @property
    def max_loras(self) -> int | None:
        """Most different adapters among the running requests; None: no limit."""
        return self.adapters.limit

    @max_loras.setter
    def max_loras(self, limit: int | None) -> None:
        self.adapters.limit = limit

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs. Sessions without input do not count."""
        return len(self.requests) > len(self._parked)

    def has_finished_requests(self) -> bool:
        """Whether the workers or the front ends have yet to hear of an end."""
        return bool(self.finished_req_ids or self._failed)

    def has_requests(self) -> bool:
        """Whether another step has anything to do.

        While paused: only to tell of ends, and to hear of transfers.
        """
        if not self.is_paused and self.has_unfinished_requests():
            return True
        return self.has_finished_requests() or self.has_transfers()

    def has_transfers(self) -> bool:
        """Whether workers have yet to report transfers, so that steps without tokens are needed."""
        return self.transfers.is_busy or self.encoder_transfers.is_busy

    def has_schedulable_requests(self) -> bool:
        """Whether a step could give tokens to somebody; if not, all wait for events."""
        return not self.is_paused and bool(self.running or self.waiting.has_ready or self._woken)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run. Sessions without input do not count."""
        return len(self.requests) - len(self._parked)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return len(self.running), len(self.waiting)

    # -- pauses -------------------------------------------------------------------------------

    def pause(self) -> None:
        """Schedule nothing until `resume`. Requests stay where they are, arrivals queue up."""
        self.is_paused = True
        self._steady.clear(self.running)

    def resume(self) -> None:
        """Schedule again."""
        self.is_paused = False

    # -- giving way ---------------------------------------------------------------------------

    def _preempt(self, request: Request, timestamp: float) -> None:
        """Free all KV of a request that has left `running`; it will be computed again."""
        self.transfers.give_way(request.request_id)
        self.kv_cache_manager.free(request)
        self.encoder_cache_manager.free(request)
        self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)

    def _leave_running(self, request: Request) -> None:
        """Forget what only concerns a request that runs."""
        self._steady.leave(request)
        self._prefilling.pop(request.request_id, None)
        self._unproven.pop(request.request_id, None)
        self.adapters.release(request)
        request.is_prefill_chunk = False
        request.spec_token_ids = []

    def _void_tokens_in_flight(self, request: Request) -> None:
        """Steps under way bring nothing that the request still wants."""
        request.num_stale_tokens = request.num_in_flight_tokens
        request.drop_stale_tokens = request.num_stale_tokens > 0
        request.num_output_placeholders = 0
        request.num_draft_placeholders = 0

    def _end_load_of(self, request_id: str) -> None:
        """The request waits for no load any more; nor do those that waited with it."""
        if self.transfers.connector is not None:
            self.transfers.end(request_id)
            for request in self._load_waiters.pop(request_id, ()):
                self.waiting.unblock(request)

    def _note(self, requests: list[Request]) -> None:
        """Something has happened to these blocked requests."""
        for request in requests:
            self._woken[request.request_id] = None

    def _reclaim_blocks(self, parked_only: bool = False, but: Request | None = None) -> bool:
        """Take the KV of a waiting request that holds some; False if there is none.

        Sessions without input come first, then the least urgent.
        """
        candidates = [r for r in self._holders.values() if r is not but]
        parked = [r for r in candidates if r.request_id in self._parked]
        if parked or parked_only:
            candidates = parked
        if not candidates:
            return False
        request = max(candidates, key=self.waiting.place)
        del self._holders[request.request_id]
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.num_external_computed_tokens = 0
        return True

    def _evict_uncomputed(self, request: Request) -> None:
        """Nobody may find what a step that will not run was to write.

        Blocks are findable as soon as the step that fills them is planned.
        """
        self.kv_cache_manager.evict_uncomputed_blocks(
            request.request_id, request.num_computed_tokens
        )

    def _others_hold_blocks(self) -> bool:
        """Whether blocks are held outside `running`, so that they may yet come free."""
        transfers = self.transfers
        return bool(transfers.holds or transfers.loads)
