"""Situations that random histories found to go wrong once, each in its smallest form."""

from __future__ import annotations

import pytest

from jubako.kv_cache import KVCacheSpec
from jubako.scheduler import (
    AsyncScheduler,
    DraftTokenIds,
    FinishReason,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from tests.kv_cache.fakes import chunked, full, mamba, window
from tests.scheduler.fakes import FakeECConnector, FakeKVConnector
from tests.scheduler.harness import Driver, make_request, make_scheduler, scheduled

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


def with_item(request: Request, identifier: str, offset: int, length: int) -> Request:
    place = PlaceholderRange(offset, length)
    feature = MultiModalFeatureSpec(None, "image", identifier, place)
    return Request(
        request.request_id,
        request.prompt_token_ids,
        request.sampling_params,
        mm_features=[*request.mm_features, feature],
        arrival_time=request.arrival_time,
        priority=request.priority,
    )


def run_with_loads(driver: Driver, *may_fail: str) -> None:
    """To the end, with every load done in the step after it began."""
    driver.expected_errors = set(may_fail)
    for _ in range(300):
        if not driver.scheduler.has_requests():
            break
        for request_id in list(driver.mirror.loads):
            driver.mirror.finish_load(request_id)
        driver.step()
    assert not driver.scheduler.requests, "no progress"
    while driver.in_flight:
        driver.take_result()
    driver.check_answers()


# -- loads that hold blocks while nobody runs ---------------------------------------------------


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_ended_loads_that_fill_the_cache_between_them_let_one_go_on(scheduler_class):
    connector = FakeKVConnector()
    scheduler = make_scheduler(
        scheduler_class=scheduler_class,
        block_size=1,
        num_blocks=25,
        max_model_len=24,
        hooks={"connector": connector},
    )
    driver = Driver(scheduler)
    for request_id in "ab":
        connector.answers[request_id] = (0, 11, True)
        driver.add(make_request(request_id, 14, 8, ignore_eos=True))
    run_with_loads(driver)
    assert {end.finish_reason for end in driver.ended.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_ended_load_behind_a_head_that_does_not_fit_goes_on(policy: str):
    connector = FakeKVConnector()
    scheduler = make_scheduler(
        block_size=1,
        num_blocks=25,
        max_model_len=24,
        scheduling_policy=policy,
        max_num_seqs=1,
        hooks={"connector": connector},
    )
    driver = Driver(scheduler)
    connector.answers["behind"] = (0, 12, True)
    driver.add(make_request("behind", 15, 3, arrival=1.0, ignore_eos=True))
    driver.step()
    assert scheduler.requests["behind"].status is LOADING
    driver.add(make_request("head", 18, 3, arrival=0.0, ignore_eos=True))
    run_with_loads(driver)


def test_a_loaded_state_can_be_found_in_the_step_in_which_its_load_ends():
    """Nobody runs, so a lookup that is put off would look like a cache that is too small."""
    connector = FakeKVConnector()
    connector.most = lambda request: request.num_tokens - 1
    scheduler = make_scheduler(
        specs=[full(2), mamba("all", 0, 4)],
        block_size=2,
        num_blocks=40,
        max_model_len=32,
        max_num_seqs=1,
        scheduling_policy="priority",
        hooks={"connector": connector},
    )
    driver = Driver(scheduler)
    prompt = list(range(40, 53))
    connector.answers["first"] = (0, 12, True)
    driver.add(make_request("first", prompt, 3, priority=2, ignore_eos=True))
    driver.step()
    assert scheduler.requests["first"].status is LOADING
    driver.mirror.finish_load("first")
    driver.step()
    driver.add(make_request("urgent", [*prompt, 7, 8, 9], 3, priority=1, ignore_eos=True))
    run_with_loads(driver)


# -- loads that fail while steps overlap --------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    "specs", [[mamba("all", 0, 4)], [full(4), window(5, 4)], [full(4)]], ids=["state", "window", ""]
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_load_inside_a_step_is_noticed_whatever_later_steps_have_let_go(
    depth: int, specs: list[KVCacheSpec], policy: str
):
    connector = FakeKVConnector()
    connector.most = lambda request: request.num_tokens - 1
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler,
        specs=specs,
        max_model_len=48,
        max_num_batched_tokens=8,
        kv_load_failure_policy=policy,
        hooks={"connector": connector},
    )
    driver = Driver(scheduler, depth=depth, evicted=True)
    connector.answers["a"] = (0, 16, False)
    connector.fails["a"] = 0
    driver.add(make_request("a", 39, 3, ignore_eos=True))
    run_with_loads(driver, *(["a"] if policy == "fail" else []))
    reason = driver.ended["a"].finish_reason
    assert reason is (FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_who_has_the_blocks_of_a_load_that_failed_after_its_request_gave_way_is_left_alone(
    policy: str,
):
    connector = FakeKVConnector()
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler,
        num_blocks=13,
        max_model_len=24,
        max_num_batched_tokens=60,
        kv_load_failure_policy=policy,
        scheduling_policy="priority",
        hooks={"connector": connector},
    )
    driver = Driver(scheduler, depth=3, evicted=True)
    connector.answers["loads"] = (0, 16, False)
    connector.fails["loads"] = 0
    # Less urgent, or it would be the first to take blocks again: its own.
    driver.add(make_request("loads", 20, 1, ignore_eos=True, priority=1))
    driver.step()
    old_blocks = set(scheduler.kv_cache_manager.get_block_ids("loads")[0])
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    prompt = list(range(50, 68))
    driver.add(*(make_request(i, prompt, 1, ignore_eos=True) for i in ("next", "like next")))
    driver.step()
    shared = [set(scheduler.kv_cache_manager.get_block_ids(i)[0]) for i in ("next", "like next")]
    assert old_blocks & shared[0] & shared[1]
    # Now the failure is reported.
    run_with_loads(driver, "loads")
    for request_id in ("next", "like next"):
        assert driver.ended[request_id].finish_reason is FinishReason.LENGTH
        assert driver.requests[request_id].num_preemptions == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_who_has_a_block_of_a_failed_load_that_a_window_let_go_of_is_left_alone(policy: str):
    connector = FakeKVConnector()
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler,
        specs=[window(5, 4)],
        num_blocks=6,
        max_model_len=32,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=6,
        scheduler_reserve_full_isl=False,
        kv_load_failure_policy=policy,
        hooks={"connector": connector},
    )
    driver = Driver(scheduler, depth=3, evicted=True)
    connector.answers["loads"] = (0, 16, False)
    connector.fails["loads"] = 3
    driver.add(make_request("filler", 3, 9, ignore_eos=True))
    driver.add(make_request("loads", 23, 1, ignore_eos=True))
    driver.step()
    (loaded,) = {i for i in scheduler.kv_cache_manager.get_block_ids("loads")[0][:4] if i}
    # The last chunk lets go of what was loaded, and takes no block that could be this one.
    driver.abort("filler")
    driver.step()
    prompt = list(range(50, 55))
    others = [make_request(i, prompt, 3, ignore_eos=True) for i in ("next", "like next")]
    driver.add(*others)
    step = driver.schedule()
    driver.sample(step, driver.mirror.forward(step))
    for other in others:
        assert scheduler.kv_cache_manager.get_block_ids(other.request_id)[0][0] == loaded
    # Now the failure is reported.
    driver.take_result()
    assert [other.status for other in others] == [RequestStatus.RUNNING] * 2
    run_with_loads(driver, "loads")


def test_a_failed_load_of_a_whole_prompt_leaves_the_last_token_to_compute():
    """At the border of a chunk nothing before it is needed, so that all of the prompt is intact."""
    connector = FakeKVConnector()
    scheduler = make_scheduler(
        specs=[chunked(6, 2)], block_size=2, max_model_len=24, hooks={"connector": connector}
    )
    driver = Driver(scheduler, evicted=True)
    connector.answers["a"] = (0, 6, True)
    connector.fails["a"] = 1
    driver.add(make_request("a", 6, 3, ignore_eos=True))
    run_with_loads(driver)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_after_a_failed_encoder_load_everything_that_a_window_reads_is_there(depth: int):
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler,
        specs=[full(4), window(8, 2)],
        max_model_len=40,
        max_num_batched_tokens=8,
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        hooks={"ec_connector": FakeECConnector("A")},
    )
    driver = Driver(scheduler, depth=depth, evicted=True)
    driver.mirror.unreadable_outputs = {"A"}
    driver.add(with_item(make_request("a", 30, 6, ignore_eos=True), "A", 9, 3))
    run_with_loads(driver)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_encoder_load_is_noticed_by_all_who_found_it_in_flight(depth: int):
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler,
        caching=False,
        max_model_len=40,
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        hooks={"ec_connector": FakeECConnector("A")},
    )
    driver = Driver(scheduler, depth=depth)
    driver.mirror.unreadable_outputs = {"A"}
    driver.add(with_item(make_request("first", 10, 3, ignore_eos=True), "A", 2, 3))
    driver.step()
    driver.add(with_item(make_request("second", 12, 3, ignore_eos=True), "A", 4, 3))
    run_with_loads(driver)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_encoder_load_is_noticed_by_who_found_the_kv_behind_it(depth: int, together: bool):
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler if depth > 1 else Scheduler,
        max_model_len=60,
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        hooks={"ec_connector": FakeECConnector("A")},
    )
    driver = Driver(scheduler, depth=depth, evicted=True)
    driver.mirror.unreadable_outputs = {"A"}
    prompt = [*range(70, 73), 0, 0, 0, *range(80, 90)]
    first = make_request("first", prompt, 3, ignore_eos=True)
    driver.add(with_item(first, "A", 3, 3))
    if not together:
        driver.step()
    second = make_request("second", [*prompt, 5, 6, 7], 3, ignore_eos=True)
    driver.add(with_item(second, "A", 3, 3))
    run_with_loads(driver)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_failed_encoder_load_is_noticed_by_who_found_the_kv_of_another_reader(depth: int):
    """The output is loaded in one step and read in the next, before it is known to have failed."""
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler,
        max_model_len=60,
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        hooks={"ec_connector": FakeECConnector("A")},
    )
    driver = Driver(scheduler, depth=depth, evicted=True)
    driver.mirror.unreadable_outputs = {"A"}
    driver.add(with_item(make_request("loads", 12, 3, ignore_eos=True), "A", 3, 3))
    driver.step()
    prompt = [*range(70, 73), 0, 0, 0, *range(80, 90)]
    driver.add(
        with_item(make_request("reads", prompt, 3, ignore_eos=True), "A", 3, 3),
        with_item(make_request("finds", [*prompt, 5, 6], 3, ignore_eos=True), "A", 3, 3),
    )
    run_with_loads(driver)


class MuteECConnector(FakeECConnector):
    """Cannot make its instructions whenever there is something to load."""

    lost: set[str]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> list[str]:
        loads = super().build_connector_meta(scheduler_output)
        if loads:
            self.lost.update(loads)
            raise RuntimeError("lost the other side")
        return loads


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_encoder_load_that_the_worker_never_hears_of_is_noticed(depth: int):
    connector = MuteECConnector("A", "B")
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler if depth > 1 else Scheduler,
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        hooks={"ec_connector": connector},
    )
    driver = Driver(scheduler, depth=depth, evicted=True)
    connector.lost = driver.mirror.untold_outputs
    driver.add(make_request("other", 10, 6, ignore_eos=True))
    driver.step()
    # Two steps in a row, while an earlier one is under way.
    for request_id in "AB":
        request = make_request(request_id, 12, 3, ignore_eos=True)
        driver.add(with_item(request, request_id, 3, 3))
        driver.step()
    run_with_loads(driver)


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_kv_behind_a_loaded_item_is_found_once_the_load_is_good(scheduler_class: type[Scheduler]):
    scheduler = make_scheduler(
        scheduler_class=scheduler_class,
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        hooks={"ec_connector": FakeECConnector("A")},
    )
    driver = Driver(scheduler)
    prompt = [*range(70, 73), 0, 0, 0, *range(80, 90)]
    driver.add(with_item(make_request("first", prompt, 1), "A", 3, 3))
    driver.step()
    driver.add(with_item(make_request("second", [*prompt, 5, 6], 1), "A", 3, 3))
    assert scheduled(driver.step()) == {"second": 2}
    driver.run()
    driver.check_answers()


# -- media that may not be split ----------------------------------------------------------------


def careful(scheduler: Scheduler) -> Driver:
    """A driver that lets nobody end with an error."""
    return Driver(scheduler, expected_errors=set())


def unsplittable(**options: object) -> Scheduler:
    values: dict[str, object] = {
        "disable_chunked_mm_input": True,
        "max_num_encoder_input_tokens": 20,
        "encoder_cache_size": 40,
        "max_num_seqs": 4,
    }
    return make_scheduler(**(values | options))  # type: ignore[arg-type]


def test_an_item_right_behind_a_prefix_hit_may_exceed_the_threshold():
    driver = careful(unsplittable(long_prefill_token_threshold=3, max_num_batched_tokens=32))
    prefix = list(range(50, 58))
    driver.add(make_request("first", [*prefix, 1], 1))
    driver.run()
    other = make_request("other", 30, 2, ignore_eos=True)
    driver.add(
        with_item(make_request("a", [*prefix, *[0] * 8, 3], 2, ignore_eos=True), "A", 8, 8), other
    )
    step = driver.step()
    assert scheduled(step)["a"] >= 8
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("offset", [0, 4])
def test_a_fair_share_smaller_than_an_item_stops_nobody(offset: int):
    driver = careful(unsplittable(fair_prefill=True, max_num_batched_tokens=14))
    for request_id in "ab":
        request = make_request(request_id, 24, 2, ignore_eos=True)
        driver.add(with_item(request, request_id, offset, 8))
    driver.run()
    driver.check_answers()


# -- encoder outputs of a request that is taken out of the step again ---------------------------


def load_for_a_victim() -> tuple[Driver, SchedulerOutput]:
    """ "mid" shares an item with "worst", which loads it and has to give way in the same step."""
    scheduler = make_scheduler(
        scheduling_policy="priority",
        num_blocks=11,
        max_model_len=32,
        long_prefill_token_threshold=8,
        max_num_batched_tokens=32,
        max_num_encoder_input_tokens=20,
        encoder_cache_size=40,
        hooks={"ec_connector": FakeECConnector("A", "B")},
    )
    driver = Driver(scheduler)
    worst = with_item(make_request("worst", 24, 2, priority=9), "A", 9, 2)
    driver.add(
        with_item(worst, "B", 12, 2),
        with_item(make_request("mid", 24, 2, priority=9, arrival=1.0), "A", 9, 2),
        make_request("best", 8, 2, priority=9, arrival=2.0, ignore_eos=True),
    )
    assert scheduled(driver.step()) == {"worst": 8, "mid": 8, "best": 8}
    scheduler.requests["mid"].priority, scheduler.requests["best"].priority = 1, 0
    step = driver.schedule()
    assert step.preempted_req_ids == {"worst"}
    return driver, step


def test_nothing_is_loaded_for_a_request_that_leaves_the_step():
    driver, step = load_for_a_victim()
    wanted = set(step.ec_connector_metadata or ())
    assert "B" not in wanted
    encoded = [i for inputs in step.scheduled_encoder_inputs.values() for i in inputs]
    # "mid" needs A still: from one of the two, not from both.
    assert ("A" in wanted) + len(encoded) == 1
    driver.in_flight.append((step, driver.mirror.execute(step)))
    driver.take_result()
    driver.run()
    driver.check_answers()


class FailingECConnector(FakeECConnector):
    """Fails when it is to load something for request "bad"."""

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        if request.request_id == "bad":
            raise RuntimeError("lost the other side")
        super().update_state_after_alloc(request, index)


def test_who_shares_an_item_with_a_request_that_cannot_load_it_loads_it():
    scheduler = make_scheduler(
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        hooks={"ec_connector": FailingECConnector("A")},
    )
    driver = Driver(scheduler)
    for request_id in ("bad", "good"):
        driver.add(with_item(make_request(request_id, 12, 3, ignore_eos=True), "A", 3, 3))
    step = driver.step()
    assert scheduled(step) == {"good": 12}
    assert step.ec_connector_metadata == ["A"]
    run_with_loads(driver, "bad")
    assert driver.ended["bad"].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("elsewhere", [(), ("A",), ("A", "B")], ids=["none", "one", "both"])
def test_a_request_takes_over_an_item_from_the_victim_that_makes_room_for_it(
    elsewhere: tuple[str, ...],
):
    scheduler = make_scheduler(
        scheduling_policy="priority",
        num_blocks=8,
        max_model_len=28,
        long_prefill_token_threshold=8,
        max_num_batched_tokens=32,
        scheduler_reserve_full_isl=False,
        max_num_encoder_input_tokens=4,
        encoder_cache_size=40,
        hooks={"ec_connector": FakeECConnector(*elsewhere)},
    )
    driver = Driver(scheduler)
    best = with_item(make_request("best", 24, 2, priority=1, arrival=1.0), "A", 9, 2)
    driver.add(
        with_item(make_request("worst", 24, 2, priority=1), "A", 9, 2),
        with_item(best, "B", 12, 2),
    )
    assert scheduled(driver.step()) == {"worst": 8, "best": 8}
    scheduler.requests["worst"].priority = 9
    step = driver.schedule()
    assert step.preempted_req_ids == {"worst"}
    assert scheduled(step) == {"best": 8}
    assert step.ec_connector_metadata == list(elsewhere)
    encoded = [i for i, name in enumerate("AB") if name not in elsewhere]
    assert step.scheduled_encoder_inputs == ({"best": encoded} if encoded else {})
    driver.in_flight.append((step, driver.mirror.execute(step)))
    driver.take_result()
    driver.run()
    driver.check_answers()


def test_an_item_whose_heir_leaves_the_step_as_well_is_computed_by_nobody():
    scheduler = make_scheduler(
        scheduling_policy="priority",
        num_blocks=8,
        max_model_len=28,
        max_num_batched_tokens=24,
        scheduler_reserve_full_isl=False,
        max_num_encoder_input_tokens=3,
        encoder_cache_size=40,
    )
    driver = Driver(scheduler)
    driver.add(
        with_item(make_request("best", 4, 2, priority=1, ignore_eos=True), "C", 0, 3),
        with_item(make_request("worst", 12, 2, priority=1, arrival=1.0), "A", 8, 3),
        with_item(make_request("mid", 24, 2, priority=1, arrival=2.0), "A", 4, 3),
    )
    # C leaves no room for A in the encoder's step.
    assert scheduled(driver.step()) == {"best": 4, "worst": 8, "mid": 4}
    scheduler.requests["worst"].priority, scheduler.requests["mid"].priority = 9, 5
    step = driver.schedule()
    assert step.preempted_req_ids == {"worst", "mid"}
    assert step.scheduled_encoder_inputs == {}
    assert "A" not in scheduler.encoder_cache_manager.cached
    driver.in_flight.append((step, driver.mirror.execute(step)))
    driver.take_result()
    driver.run()
    driver.check_answers()


# -- drafts and the limit of one request --------------------------------------------------------


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_the_threshold_binds_a_decode_with_drafts(scheduler_class: type[Scheduler]):
    scheduler = make_scheduler(
        scheduler_class=scheduler_class,
        max_num_batched_tokens=13,
        long_prefill_token_threshold=3,
    )
    scheduler.num_spec_tokens = 4
    driver = Driver(scheduler)
    driver.add(make_request("a", 1, 14, ignore_eos=True))
    driver.step()
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5, 6, 7, 8]]))
    step = driver.step()
    assert scheduled(step) == {"a": 3}
    assert step.scheduled_spec_decode_tokens == {"a": [5, 6]}
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("together", [True, False])
def test_a_decode_with_drafts_that_is_alone_is_not_bound(together: bool):
    scheduler = make_scheduler(long_prefill_token_threshold=3, fair_prefill=True)
    driver = Driver(scheduler)
    driver.add(make_request("a", 1, 14, ignore_eos=True))
    if together:
        driver.add(make_request("b", 1, 14, ignore_eos=True))
    driver.step()
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5, 6, 7, 8]]))
    assert scheduled(driver.step())["a"] == (3 if together else 5)
    driver.run()
    driver.check_answers()
