"""The worked examples of the scheduling rules, number for number."""

from __future__ import annotations

from jubako.scheduler import DraftTokenIds, FinishReason
from tests.scheduler.harness import (
    Driver,
    ids,
    make_request,
    make_scheduler,
    result_for,
    scheduled,
)


def test_budget_goes_to_running_requests_first_and_then_in_order_of_arrival():
    driver = Driver(make_scheduler(max_num_batched_tokens=32))
    driver.add(*(make_request(i, n, ignore_eos=True) for i, n in (("a", 10), ("b", 50), ("c", 5))))
    assert driver.run(4) == [
        {"a": 10, "b": 22},
        {"a": 1, "b": 28, "c": 3},
        {"a": 1, "b": 1, "c": 2},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_long_prefill_threshold_caps_every_chunk():
    driver = Driver(make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=8))
    driver.add(*(make_request(i, n, ignore_eos=True) for i, n in (("a", 20), ("b", 20), ("c", 5))))
    assert driver.run(4) == [
        {"a": 8, "b": 8, "c": 5},
        {"a": 8, "b": 8, "c": 1},
        {"a": 4, "b": 4, "c": 1},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_last_of_running_is_preempted_when_blocks_run_out():
    driver = Driver(make_scheduler(block_size=4, num_blocks=13, max_model_len=40))
    driver.add(*(make_request(i, 15, ignore_eos=True) for i in "abc"))
    manager = driver.scheduler.kv_cache_manager
    step = driver.step()
    assert scheduled(step) == {"a": 15, "b": 15, "c": 15}
    assert [len(manager.get_block_ids(i)[0]) for i in "abc"] == [4, 4, 4]
    assert scheduled(driver.step()) == {"a": 1, "b": 1, "c": 1}
    step = driver.step()
    assert scheduled(step) == {"a": 1, "b": 1}
    assert step.preempted_req_ids == {"c"}
    assert [len(manager.get_block_ids(i)[0]) for i in "abc"] == [5, 5, 0]
    # Two blocks are left, and c needs five for its 17 tokens.
    step = driver.step()
    assert scheduled(step) == {"a": 1, "b": 1}
    assert ids(driver.scheduler.waiting) == ["c"]
    assert driver.scheduler.requests["c"].num_tokens == 17
    driver.abort("a")
    step = driver.step()
    assert step.scheduled_cached_reqs.resumed_req_ids == {"c"}
    assert scheduled(step)["b"] == 1


def test_prefix_hits_are_whole_blocks_and_leave_the_last_token():
    driver = Driver(make_scheduler(block_size=4))
    prefix = list(range(100, 116))
    driver.add(make_request("first", prefix, 1))
    driver.run()
    for request_id, prompt, hit in (("same", prefix, 12), ("longer", [*prefix, 7], 16)):
        driver.add(make_request(request_id, prompt, 1))
        step = driver.step()
        assert step.scheduled_new_reqs[0].num_computed_tokens == hit
        assert scheduled(step) == {request_id: len(prompt) - hit}
        assert driver.ended[request_id].num_cached_tokens == hit


def test_rejected_drafts_are_taken_back():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 10, 16, eos=99))
    step = scheduler.schedule()
    scheduler.update_from_output(step, result_for(step, a=[50]))
    request = scheduler.requests["a"]
    assert (request.num_tokens, request.num_computed_tokens) == (11, 10)

    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[2, 3, 4]]))
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 4}
    assert step.scheduled_spec_decode_tokens == {"a": [2, 3, 4]}
    assert request.num_computed_tokens == 14
    messages = scheduler.update_from_output(step, result_for(step, a=[2, 77]))
    assert messages[0].outputs[0].new_token_ids == [2, 77]
    assert (request.num_tokens, request.num_computed_tokens) == (13, 12)

    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5, 99, 6]]))
    step = scheduler.schedule()
    (output,) = scheduler.update_from_output(step, result_for(step, a=[5, 99, 6, 8]))[0].outputs
    assert output.new_token_ids == [5, 99]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None


def test_reset_puts_running_requests_back_in_their_order():
    driver = Driver(make_scheduler())
    driver.add(*(make_request(i, 6, ignore_eos=True) for i in "abc"))
    driver.run(2)
    driver.add(make_request("d", 6, ignore_eos=True))
    assert driver.scheduler.reset_prefix_cache() is False
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert ids(driver.scheduler.waiting) == ["a", "b", "c", "d"]
    step = driver.step()
    assert step.scheduled_cached_reqs.resumed_req_ids == {"a", "b", "c"}
    assert scheduled(step) == {"a": 8, "b": 8, "c": 8, "d": 6}
    driver.run()
    driver.check_answers()
