"""What does the scheduler hold, and how does a request come and go?"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from typing import Any

from jubako.config import JubakoConfig
from jubako.errors import JubakoError, ValidationError
from jubako.kv_cache import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheMetricsCollector,
    get_hash_fn_by_name,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)
from jubako.scheduler.encoder_cache import EncoderCacheManager
from jubako.scheduler.engine_output import EngineCoreEventType, EngineCoreOutput, FinishReason
from jubako.scheduler.limits import (
    DEFAULT_BLOCK_SIZE,
    check_options,
    check_request,
    resolve_max_model_len,
)
from jubako.scheduler.model_output import KVConnectorOutput
from jubako.scheduler.protocols import ECConnector, KVConnector, StructuredOutputManager
from jubako.scheduler.queue import RequestQueue, create_request_queue
from jubako.scheduler.request import Request, RequestStatus

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
        self.max_encoder_tokens = options.max_num_encoder_input_tokens
        self.max_loras: int | None = None
        self.num_lookahead_tokens = 0
        """Slots behind a request's tokens that a drafter writes to."""
        self.max_model_len = resolve_max_model_len(config, kv_cache_config)
        check_options(config, kv_cache_config, self.max_model_len)

        self._init_kv_cache(block_size, hash_block_size)
        self.encoder_cache_manager = EncoderCacheManager(options.encoder_cache_size)

        self.requests: dict[str, Request] = {}
        """Every request that has not ended."""
        self.waiting: RequestQueue = create_request_queue(self.policy)
        self.running: list[Request] = []
        """In the order of admission."""
        self.finished_req_ids: set[str] = set()
        """Ended since the last step; the workers hear of them with the next."""
        self.prev_step_scheduled_req_ids: set[str] = set()
        self._prefilling: dict[str, Request] = {}
        """Running requests whose last chunk ended before their last known token."""
        self._failed: list[tuple[int, EngineCoreOutput]] = []
        """Last outputs of requests that failed outside `update_from_output`."""
        self._finished_by_client: dict[int, set[str]] | None = {} if include_finished_set else None
        self._loaded: dict[str, int] = {}
        """Requests that wait for remote KV: tokens they will have when it has come."""
        self._finished_recving: set[str] = set()
        self._held_blocks: dict[str, tuple[list[Any], set[str]]] = {}
        """Blocks of ended requests that a transfer still reads or writes, and what it waits for."""
        self._seeds = random.Random(config.model_config.seed)
        self._has_drafts = False
        self._num_preemptions = 0
        self._num_scheduled_tokens = 0
        self._step_counter = 0

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
        self.block_size = block_size or sizes[0]
        self.hash_block_size = hash_block_size or sizes[1]
        self.enable_prefix_caching = caching
        self.block_hasher = None
        if caching or self.connector is not None:
            self.block_hasher = get_request_block_hasher(
                self.hash_block_size, get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            )
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
        )

    # -- arrivals -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises `ValidationError` or `NotImplementedFeatureError`, with nothing changed, for one that
        can never run: a known id, an empty or too long prompt, a priority where none is scheduled.
        """
        request_id = request.request_id
        if request_id in self.requests or request_id in self.finished_req_ids:
            raise ValidationError(
                f"request_id {request_id!r} is in use; choose another.", "request_id", request_id
            )
        check_request(
            request,
            max_model_len=self.max_model_len,
            policy=self.policy,
            media_room=min(self.max_encoder_tokens, self.encoder_cache_manager.cache_size),
            has_grammars=self.structured_output_manager is not None,
        )
        if request.block_hasher is None:
            if self.block_hasher is not None:
                request.attach_block_hasher(self.block_hasher, self.hash_block_size)
        else:
            request.set_hash_block_size(self.hash_block_size)
        if request.sampling_params is not None and request.seed is None:
            request.seed = self._seeds.getrandbits(63)
        request.total_token_limit = min(request.total_token_limit, self.max_model_len)
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    # -- counts -------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.requests)

    def has_finished_requests(self) -> bool:
        """Whether the workers or the front ends have yet to hear of an end."""
        return bool(self.finished_req_ids or self._failed)

    def has_requests(self) -> bool:
        """Whether another step has anything to do."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return len(self.running), len(self.waiting)

    # -- giving way ---------------------------------------------------------------------------

    def _preempt(self, request: Request, timestamp: float) -> None:
        """Free all KV of a request that has left `running`; it will be computed again."""
        self.kv_cache_manager.free(request)
        self.encoder_cache_manager.free(request)
        self._prefilling.pop(request.request_id, None)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.is_prefill_chunk = False
        request.spec_token_ids = []
        request.num_preemptions += 1
        self._num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)

    def _evict_uncomputed(self, request: Request) -> None:
        """Nobody may find what a step that will not run was to write.

        Blocks are findable as soon as the step that fills them is planned.
        """
        self.kv_cache_manager.evict_uncomputed_blocks(
            request.request_id, request.num_computed_tokens
        )

    def _others_hold_blocks(self) -> bool:
        """Whether blocks are held outside `running`, so that they may yet come free."""
        return bool(self._held_blocks or self._loaded)

    # -- ends ---------------------------------------------------------------------------------

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> None:
        """End requests from outside; None means all. Unknown and ended ids are ignored.

        No output is made for them.
        """
        assert finished_status.is_finished, finished_status
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ending = {
            request_id: request
            for request_id in request_ids
            if (request := self.requests.get(request_id)) is not None
        }
        if not ending:
            return
        running = [r for r in ending.values() if r.status is RequestStatus.RUNNING]
        if len(running) == 1:
            self.running.remove(running[0])
        elif running:
            gone = set(running)
            self.running = [request for request in self.running if request not in gone]
        for request in ending.values():
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove(request)
            request.status = finished_status
            self._free_request(request)

    def _free_request(self, request: Request) -> dict[str, Any] | None:
        """Forget a request that has ended and left its queue; parameters for its last output."""
        request_id = request.request_id
        reasons: set[str] = set()
        transfer_params: dict[str, Any] | None = None
        if self.connector is not None:
            block_ids = self.kv_cache_manager.get_block_ids(request_id)
            try:
                sends, transfer_params = self.connector.request_finished(request, block_ids)
            except Exception:
                logger.exception("The KV connector failed at the end of request %s", request_id)
                sends = False
            if sends:
                reasons.add("send")
            if self._loaded.pop(request_id, None) is not None:
                if request_id not in self._finished_recving:
                    reasons.add("recv")
                self._finished_recving.discard(request_id)
        if self.ec_connector is not None:
            self.ec_connector.request_finished(request)
        if self.structured_output_manager is not None and request.uses_grammar:
            self.structured_output_manager.release(request)
        self.encoder_cache_manager.free(request)
        if reasons:
            blocks = self.kv_cache_manager.pop_blocks_for_free(request)
            self._held_blocks[request_id] = (blocks, reasons)
        else:
            self.kv_cache_manager.free(request)
        self._prefilling.pop(request_id, None)
        self.finished_req_ids.add(request_id)
        if self._finished_by_client is not None:
            self._finished_by_client.setdefault(request.client_index, set()).add(request_id)
        del self.requests[request_id]
        return transfer_params

    def _fail_with(self, request: Request, error: Exception) -> None:
        """End one request because of an exception; the others go on."""
        if isinstance(error, JubakoError):
            message = error.message
        else:
            logger.error("Request %s failed", request.request_id, exc_info=error)
            message = "The request failed inside the engine."
        self._fail(request, message)

    def _fail(self, request: Request, message: str) -> None:
        if request.request_id not in self.requests:
            return
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED_ERROR
        self._evict_uncomputed(request)
        self._free_request(request)
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.ERROR,
            events=request.take_events(),
            num_cached_tokens=max(request.num_cached_tokens, 0),
            error=message,
        )
        self._failed.append((request.client_index, output))

    # -- connectors ---------------------------------------------------------------------------

    def _update_from_connector(self, report: KVConnectorOutput) -> None:
        if self.connector is not None:
            self.connector.update_connector_output(report)
        for request_id in report.finished_recving or ():
            if request_id in self.requests:
                self._finished_recving.add(request_id)
            else:
                self._release_hold(request_id, "recv")
        for request_id in report.finished_sending or ():
            self._release_hold(request_id, "send")

    def _release_hold(self, request_id: str, reason: str) -> None:
        hold = self._held_blocks.get(request_id)
        if hold is None:
            return
        blocks, reasons = hold
        reasons.discard(reason)
        if not reasons:
            del self._held_blocks[request_id]
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))
