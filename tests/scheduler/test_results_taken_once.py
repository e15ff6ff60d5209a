"""A step's result is handed in once: what happens to one that comes again?"""

from __future__ import annotations

import pytest

from jubako.scheduler import AsyncScheduler, Scheduler
from tests.scheduler.harness import finish, make_request, make_scheduler, result_for


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_a_step_that_comes_back_again_is_refused_and_changes_nothing(scheduler_class):
    scheduler = make_scheduler(scheduler_class=scheduler_class)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, 5, 9))
    step = scheduler.schedule()
    result = result_for(step, a=[3], b=[4])
    scheduler.update_from_output(step, result)
    following = scheduler.schedule()
    finish(scheduler, "b")
    request = scheduler.requests["a"]
    before = list(request.all_token_ids), request.num_in_flight_tokens
    with pytest.raises(ValueError, match="taken already"):
        scheduler.update_from_output(step, result)
    assert (list(request.all_token_ids), request.num_in_flight_tokens) == before
    # What ended in flight is still waited for, once.
    scheduler.update_from_output(following, result_for(following, a=[3], b=[4]))
    assert request.all_token_ids[-2:] == [3, 3]
    scheduler.schedule()
    scheduler.add_request(make_request("b", 5, 9))
