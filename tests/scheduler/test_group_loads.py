"""Connectors that are asked group by group what they can bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jubako.kv_cache import LocalBlocks
from jubako.scheduler import AsyncScheduler, GroupMatch, Request, RequestStatus, Scheduler
from tests.kv_cache.fakes import full, mamba, window
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.fakes import FakeGroupConnector
from tests.scheduler.harness import Driver, finish, make_request, make_scheduler, scheduled

PROMPT = list(range(100, 130))


class ScriptedGroups(ScriptedConnector):
    """Answers what the test says; `asked` has what was missing for each length it was asked."""

    def __init__(self, **matches: GroupMatch | None) -> None:
        super().__init__()
        self.matches = matches
        self.lengths: tuple[int, ...] = ()
        self.missing: dict[int, list[list[int]]] = {}

    def lookup_groups(self, request: Request, local: Sequence[LocalBlocks]) -> GroupMatch | None:
        self._called("lookup_groups", request.request_id)
        self.missing = {n: [group.missing(n) for group in local] for n in self.lengths}
        return self.matches.get(request.request_id, GroupMatch(0, ((), ()), False))


def make(connector: ScriptedConnector, **options: Any) -> Scheduler:
    options.setdefault("specs", [full(4), window(8, 4)])
    return make_scheduler(hooks={"connector": connector}, **options)


def with_some_evicted(scheduler: Scheduler, length: int, *evicted: int) -> None:
    """Leave the first `length` tokens of `PROMPT` cached, without some blocks of the window."""
    scheduler.add_request(make_request("first", PROMPT[:length], 1))
    run_step(scheduler)
    request = make_request("probe", PROMPT)
    assert scheduler.block_hasher is not None
    request.attach_block_hasher(scheduler.block_hasher, scheduler.hash_block_size)
    _, windowed = scheduler.kv_cache_manager.get_local_blocks(request)
    scheduler.kv_cache_manager.evict_blocks(
        block.block_id for i in evicted if (block := windowed.get(i)) is not None
    )


@pytest.mark.parametrize("is_async", [True, False])
def test_what_full_attention_has_is_not_brought_again(is_async: bool):
    connector = ScriptedGroups(a=GroupMatch(24, ([], [range(4, 6)]), is_async))
    connector.lengths = (8, 24)
    scheduler = make(connector)
    with_some_evicted(scheduler, 24, 4, 5)
    scheduler.add_request(make_request("a", PROMPT, 1))
    step = scheduler.schedule()
    assert connector.missing == {8: [[], []], 24: [[], [4, 5]]}
    assert connector.named("lookup") == []
    request = scheduler.requests["a"]
    assert request.num_external_computed_tokens == 8
    assert scheduled(step) == ({} if is_async else {"a": 6})
    if is_async:
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    # The two blocks that are its own, and not found yet, are what is brought.
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    tables = scheduler.kv_cache_manager.get_block_ids("a")
    brought = [[i for i in ids[:6] if i and not blocks[i].block_hash] for ids in tables]
    assert [len(ids) for ids in brought] == [0, 2]
    finish_step(scheduler, step, received={"a"} if is_async else ())
    if is_async:
        assert scheduled(run_step(scheduler)) == {"a": 6}
    assert all(blocks[i].block_hash for i in brought[1])
    run_step(scheduler)
    assert scheduler.kv_cache_manager.usage == 0


def test_an_answer_may_be_late():
    connector = ScriptedGroups(a=None)
    scheduler = make(connector)
    scheduler.add_request(make_request("a", PROMPT, 1))
    assert scheduled(run_step(scheduler)) == {}
    connector.matches["a"] = GroupMatch(8, ([range(2)], [range(2)]), False)
    assert scheduled(run_step(scheduler)) == {"a": 22}


def test_with_one_group_the_plain_question_is_asked():
    connector = ScriptedGroups()
    connector.answers = {"a": (8, False)}
    scheduler = make(connector, specs=[full(4)])
    scheduler.add_request(make_request("a", PROMPT, 1))
    assert scheduled(run_step(scheduler)) == {"a": 22}
    assert connector.named("lookup_groups") == []


@pytest.mark.parametrize(
    "match",
    [
        # A block that is not here, in the one group or the other.
        GroupMatch(24, ([range(5)], [range(4, 6)]), False),
        GroupMatch(24, ([range(6)], [range(4, 5)]), True),
        GroupMatch(24, ([range(6)], []), True),
        # Not a statement about these groups at all.
        GroupMatch(24, ([range(6)],), True),
    ],
)
def test_an_answer_that_leaves_out_what_is_not_here_counts_as_nothing(match, caplog):
    connector = ScriptedGroups(a=match, b=match)
    scheduler = make(connector)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [ord(request_id), *PROMPT], 1))
    step = run_step(scheduler)
    assert scheduled(step) == {"a": 31, "b": 31}
    assert connector.named("alloc") == [("a", 0), ("b", 0)]
    assert caplog.text
    finish(scheduler, "a", "b")
    run_step(scheduler)
    assert scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize("first", [1, 2])
def test_of_a_whole_prompt_what_its_last_token_reads_must_come(first: int):
    """It is computed again, one token before the end: there the window begins in another block."""
    match = GroupMatch(12, ([range(3)], [range(first, 3)]), True)
    connector = ScriptedGroups(a=match)
    scheduler = make(connector, specs=[full(4), window(5, 4)])
    scheduler.add_request(make_request("a", PROMPT[:12], 1))
    step = scheduler.schedule()
    if first == 2:
        assert scheduled(step) == {"a": 12}
        return
    assert scheduled(step) == {}
    finish_step(scheduler, step, received={"a"})
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 1}
    assert step.scheduled_new_reqs[0].num_computed_tokens == 11


def test_an_answer_no_longer_than_what_is_here_changes_nothing():
    connector = ScriptedGroups(a=GroupMatch(8, ([range(2)], [range(2)]), True))
    scheduler = make(connector)
    with_some_evicted(scheduler, 24)
    scheduler.add_request(make_request("a", PROMPT, 1))
    assert scheduled(run_step(scheduler)) == {"a": 6}
    assert connector.named("alloc")[-1] == ("a", 0)


def test_an_answer_is_cut_to_a_length_at_which_all_groups_can_go_on():
    connector = ScriptedGroups(a=GroupMatch(23, ([range(6)], [range(6)]), False))
    scheduler = make(connector)
    scheduler.add_request(make_request("a", PROMPT, 1))
    assert scheduled(run_step(scheduler)) == {"a": 10}
    assert connector.named("alloc") == [("a", 20)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "specs",
    [
        [full(4), window(8, 4)],
        [full(2), window(5, 4), window(3, 2)],
        [full(2), mamba("align", 0, 4)],
        [full(4), window(6, 2), mamba("all", 0, 4)],
    ],
    ids=["window", "windows", "states", "three kinds"],
)
@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_answers_are_the_same_whatever_comes_from_elsewhere(
    scheduler_class, specs, is_async: bool, fails: bool
):
    """The workers' mirror notices a slot that holds anything but the reader's prefix."""
    connector = FakeGroupConnector(alignment=4)
    connector.most = lambda request: request.num_tokens - 1
    scheduler = make_scheduler(
        scheduler_class=scheduler_class,
        specs=specs,
        block_size=specs[0].block_size,
        num_blocks=60,
        max_model_len=64,
        hooks={"connector": connector},
    )
    driver = Driver(scheduler, depth=1 if scheduler_class is Scheduler else 2, evicted=True)
    driver.check_blocks = True
    taken: list[Any] = []
    find = scheduler.transfers.lookup.find
    scheduler.transfers.lookup.find = lambda *a: taken.append(find(*a)) or taken[-1]
    for number, known in enumerate((0, 12, 24, 28)):
        request = make_request(f"r{number}", [*PROMPT, number], 6, ignore_eos=True)
        connector.answers[request.request_id] = (0, known, is_async)
        if fails:
            connector.fails[request.request_id] = 1
        driver.add(request)
        while scheduler.has_requests():
            for request_id in list(driver.mirror.loads):
                driver.mirror.finish_load(request_id)
            driver.step()
        while driver.in_flight:
            driver.take_result()
        # What is left here of it is not the same in all groups.
        for group in scheduler.kv_cache_manager.get_local_blocks(request)[1:]:
            for index in (2, 4, 5, 6):
                block = group.get(index)
                if block is not None:
                    scheduler.kv_cache_manager.evict_blocks([block.block_id])
    driver.run()
    driver.check_answers()
    assert any(match is not None and match.num_tokens for match in taken)
    assert scheduler.kv_cache_manager.usage == 0
