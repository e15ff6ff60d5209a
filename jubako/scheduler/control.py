"""What can be asked of a scheduler, or done to it, beside planning steps?"""

from __future__ import annotations

import time
from typing import Any

from jubako.scheduler.ends import Ends
from jubako.scheduler.engine_output import SchedulerStats, SpecDecodingStats
from jubako.scheduler.request import Request


class Control(Ends):
    """Resets, statistics, events and the end."""

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; False, with nothing forgotten, if blocks are in use.

        With `reset_running_requests` running requests are preempted first and computed again from
        nothing. With `reset_connector` the connector must forget too.
        """
        if reset_running_requests:
            timestamp = time.monotonic()
            while self.running:
                request = self.running.pop()
                self._preempt(request, timestamp)
                self._drop_tokens_in_flight(request)
                self.waiting.put_back([request])
            while self._reclaim_blocks():
                pass
            for load in self.transfers.loads.values():
                if not load.reported and not load.is_cancelled:
                    self.transfers.cancel(load, timestamp)
            # Whoever comes back brings all its tokens, even straight after its last step.
            self.prev_step_scheduled_req_ids = frozenset()
        done = self.kv_cache_manager.reset_prefix_cache()
        if reset_connector:
            done = self.transfers.reset_cache() and done
        return done

    def _drop_tokens_in_flight(self, request: Request) -> None:
        """Nothing is in flight between two steps unless steps overlap."""

    def reset_encoder_cache(self) -> None:
        """Forget all encoder outputs, because the weights that made them changed."""
        self.encoder_cache_manager.reset()
        self._note(self.encoder_transfers.reset())

    def make_stats(self) -> SchedulerStats | None:
        """The state after a step, with counts since the last report; None without `log_stats`."""
        if not self.log_stats:
            return None
        stats = SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            step_counter=self._step_counter,
            kv_cache_usage=self.kv_cache_manager.usage,
            encoder_cache_usage=self.encoder_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats(),
            num_preemptions=self._num_preemptions,
            num_scheduled_tokens=self._num_scheduled_tokens,
            connector_prefix_cache_stats=self.transfers.take_stats(),
            kv_connector_stats=self.transfers.connector_stats(self._connector_stats),
            kv_unknown_reports=self.transfers.num_unknown_reports,
            waiting_lora_adapters=self.adapters.num_waiting,
            running_lora_adapters=self.adapters.num_running,
            encoder_cache_stats=self.encoder_cache_manager.take_stats(),
            num_parked_reqs=len(self._parked),
        )
        if self._spec_decoding.num_drafts:
            stats.spec_decoding_stats = self._spec_decoding
            self._spec_decoding = SpecDecodingStats()
        self._connector_stats = None
        if self._kv_metrics is not None:
            stats.kv_cache_eviction_events = self._kv_metrics.drain_events()
        self._num_preemptions = 0
        self._num_scheduled_tokens = 0
        return stats

    def take_kv_cache_events(self) -> list[Any]:
        """Blocks that came and went since the last call, if events are on."""
        return [*self.kv_cache_manager.take_events(), *self.transfers.take_events()]

    def shutdown(self) -> None:
        """Let connectors end."""
        self.transfers.shutdown()
        self.encoder_transfers.shutdown()
