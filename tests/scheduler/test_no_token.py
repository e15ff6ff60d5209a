"""A request that no token could be chosen for ends with an error, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest

from jubako.scheduler import AsyncScheduler, FinishReason, Scheduler
from tests.scheduler.harness import make_request, make_scheduler, result_for


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_the_request_ends_and_its_neighbour_goes_on(
    scheduler_class: Any, steps_before: int
) -> None:
    scheduler = make_scheduler(scheduler_class=scheduler_class)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, 5, 20))
    for _ in range(steps_before):
        step = scheduler.schedule()
        scheduler.update_from_output(step, result_for(step, a=[3], b=[4]))
    step = scheduler.schedule()
    result = result_for(step, b=[4])
    result.failures = {"a": "no token"}
    outputs = scheduler.update_from_output(step, result)[0].outputs
    by_id = {output.request_id: output for output in outputs}
    assert by_id["a"].finish_reason is FinishReason.ERROR
    assert by_id["a"].error == "no token"
    assert by_id["b"].new_token_ids == [4]
    assert list(scheduler.requests) == ["b"]
    step = scheduler.schedule()
    assert step.finished_req_ids == {"a"}
    outputs = scheduler.update_from_output(step, result_for(step, b=[7]))[0].outputs
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [("b", [7])]


def test_a_step_in_flight_of_a_request_that_failed_is_ignored() -> None:
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, 5, 20))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert set(second.num_scheduled_tokens) == {"a", "b"}
    result = result_for(first, b=[4])
    result.failures = {"a": "no token"}
    scheduler.update_from_output(first, result)
    outputs = scheduler.update_from_output(second, result_for(second, a=[9], b=[5]))[0].outputs
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [("b", [5])]
    assert list(scheduler.requests) == ["b"]
