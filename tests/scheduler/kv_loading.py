"""What tests of KV that comes from elsewhere share: schedulers with options, and what is left."""

from __future__ import annotations

from typing import Any

from jubako.scheduler import (
    RequestStatus,
    Scheduler,
)
from tests.scheduler.fake_connector import ScriptedConnector
from tests.scheduler.harness import make_request, make_scheduler

REMOTE = RequestStatus.WAITING_FOR_REMOTE_KVS


def make(connector: ScriptedConnector, **options: Any) -> Scheduler:
    return make_scheduler(hooks={"connector": connector}, **options)


def with_transfer(scheduler: Scheduler, **options: Any) -> Scheduler:
    """The scheduler with other options of `KVTransferConfig`."""
    scheduler.config = scheduler.config.replace(kv_transfer_config=options)
    scheduler.transfers.calls.options = scheduler.config.kv_transfer_config
    return scheduler


def table(scheduler: Scheduler, request_id: str) -> list[int]:
    return scheduler.kv_cache_manager.get_block_ids(request_id)[0]


def no_leak(scheduler: Scheduler) -> None:
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == scheduler.kv_cache_config.num_blocks - 1
    assert not scheduler.transfers.loads
    assert not scheduler.transfers.step_loads
    assert not scheduler.transfers.holds
    assert not scheduler.transfers._loading
    assert not scheduler.transfers.lookup.asked_since
    assert not scheduler._holders
    assert not scheduler._load_waiters


def fresh_lookup(scheduler: Scheduler, prompt: list[int]) -> int:
    """How many tokens a request with this prompt would find here."""
    request = make_request("fresh", prompt)
    assert scheduler.block_hasher is not None
    request.attach_block_hasher(scheduler.block_hasher, scheduler.hash_block_size)
    return scheduler.kv_cache_manager.get_computed_blocks(request)[1]
