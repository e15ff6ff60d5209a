"""Waiting requests leave in the right order, and from the middle without a rebuild."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from jubako.scheduler import FCFSRequestQueue, PriorityRequestQueue, Request
from tests.scheduler.harness import ids, make_request

operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "pop", "remove", "put_back"]),
        st.integers(0, 3),
        st.integers(0, 20),
    ),
    max_size=60,
)


@given(operations)
@hypothesis_settings(deadline=None, max_examples=150)
def test_fcfs_queue_is_a_list(operations):
    queue, model = FCFSRequestQueue(), []
    gone: list[Request] = []
    for count, (operation, _, choice) in enumerate(operations):
        if operation == "add":
            request = make_request(f"r{count}", 1)
            queue.add(request)
            model.append(request)
        elif operation == "pop" and model:
            gone.append(queue.pop())
            assert gone[-1] is model.pop(0)
        elif operation == "remove" and model:
            request = model.pop(choice % len(model))
            queue.remove(request)
            assert request not in queue
        elif operation == "put_back":
            queue.put_back(gone)
            model[:0] = gone
            gone = []
        check(queue, model, choice)


@given(operations)
@hypothesis_settings(deadline=None, max_examples=150)
def test_priority_queue_is_a_sorted_list(operations):
    queue, model = PriorityRequestQueue(), []
    gone: list[Request] = []
    for count, (operation, priority, choice) in enumerate(operations):
        if operation == "add":
            request = make_request(f"r{count}", 1, priority=priority, arrival=float(choice))
            queue.add(request)
            model.append(request)
        elif operation == "pop" and model:
            gone.append(queue.pop())
            assert gone[-1] is model.pop(0)
        elif operation == "remove" and model:
            request = model.pop(choice % len(model))
            queue.remove(request)
            assert request not in queue
        elif operation == "put_back":
            queue.put_back(gone)
            model += gone
            gone = []
        model.sort(key=lambda r: (r.priority, r.arrival_time, r.request_id))
        check(queue, model, choice)


def check(queue, model, choice):
    assert len(queue) == len(model)
    assert bool(queue) == bool(model)
    assert list(queue) == model
    assert queue.first(choice) == model[:choice]
    assert all(request in queue for request in model)
    if model:
        assert queue.peek() is model[0]
    else:
        with pytest.raises(IndexError):
            queue.peek()
        with pytest.raises(IndexError):
            queue.pop()


@pytest.mark.parametrize("queue_class", [FCFSRequestQueue, PriorityRequestQueue])
def test_removing_an_unknown_request_is_an_error(queue_class):
    with pytest.raises(KeyError):
        queue_class().remove(make_request("a", 1))


def test_dead_entries_do_not_pile_up():
    queue = PriorityRequestQueue()
    keep = make_request("keep", 1)
    queue.add(keep)
    for i in range(10_000):
        request = make_request(f"r{i}", 1)
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 200
    assert ids(queue) == ["keep"]
