"""Connectors that do what a test tells them: answer, delay, keep, fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jubako.scheduler import (
    KVConnectorOutput,
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerOutput,
)
from tests.scheduler.harness import result_for


class ScriptedConnector:
    """A KV connector. `answers` are those of a lookup, by request id; without one, nothing.

    Methods named in `broken` raise. `calls` has each call with what identifies it.
    """

    def __init__(self, **answers: tuple[int | None, bool]) -> None:
        self.answers = answers
        self.keeps: set[str] = set()
        self.broken: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.pending_pushes = 0

    def _called(self, name: str, *what: Any) -> None:
        self.calls.append((name, *what))
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """What identifies each call of a method."""
        return [call[1:] for call in self.calls if call[0] == name]

    def on_new_request(self, request: Request) -> None:
        self._called("on_new_request", request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._called("lookup", request.request_id, num_computed_tokens)
        return self.answers.get(request.request_id, (0, False))

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        self._called("alloc", request.request_id, num_external)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        self._called("meta", list(scheduler_output.num_scheduled_tokens))
        return "meta"

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._called("output", connector_output)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._called("finished", request.request_id, block_ids, request.status)
        return request.request_id in self.keeps, {"from": request.request_id}

    def cancel_load(self, request: Request) -> None:
        self._called("cancel_load", request.request_id)

    def cancel_send(self, request: Request) -> None:
        self._called("cancel_send", request.request_id)

    def cancel_lookup(self, request: Request) -> None:
        self._called("cancel_lookup", request.request_id)

    def has_pending_push_work(self) -> bool:
        return self.pending_pushes > 0

    def get_kv_connector_stats(self) -> Any:
        return None

    def take_events(self) -> Iterable[Any]:
        return ["event"]

    def reset_cache(self) -> bool | None:
        self._called("reset_cache")
        return None

    def shutdown(self) -> None:
        self._called("shutdown")


def run_step(
    scheduler: Scheduler,
    *,
    received: Iterable[str] = (),
    failed: Iterable[str] = (),
    sent: Iterable[str] = (),
    invalid: Iterable[int] = (),
    token: int = 3,
    stats: Any = None,
) -> SchedulerOutput:
    """A step in which all who can get `token`, and the workers report as told."""
    step = scheduler.schedule()
    finish_step(
        scheduler,
        step,
        received=received,
        failed=failed,
        sent=sent,
        invalid=invalid,
        token=token,
        stats=stats,
    )
    return step


def finish_step(
    scheduler: Scheduler,
    step: SchedulerOutput,
    *,
    received: Iterable[str] = (),
    failed: Iterable[str] = (),
    sent: Iterable[str] = (),
    invalid: Iterable[int] = (),
    token: int = 3,
    stats: Any = None,
) -> dict[str, Any]:
    """Let a step come back; the outputs by request id."""
    done = {
        request_id: [token]
        for request_id in step.num_scheduled_tokens
        if request_id in scheduler.requests and not scheduler.requests[request_id].is_prefill_chunk
    }
    result: ModelRunnerOutput = result_for(step, **done)
    result.kv_connector_output = KVConnectorOutput(
        finished_recving=set(received),
        failed_recving=set(failed),
        finished_sending=set(sent),
        invalid_block_ids=set(invalid),
        kv_connector_stats=stats,
    )
    messages = scheduler.update_from_output(step, result)
    return {o.request_id: o for message in messages.values() for o in message.outputs}
