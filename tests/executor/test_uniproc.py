"""One worker in the caller's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from jubako.config import JubakoConfig
from jubako.errors import ConfigError, NotImplementedFeatureError
from jubako.executor import uniproc
from jubako.executor.executor import Executor
from jubako.executor.uniproc import UniProcExecutor
from jubako.sampling_params import SamplingParams
from jubako.scheduler.model_output import EMPTY_MODEL_RUNNER_OUTPUT
from jubako.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from jubako.worker.worker import Worker
from tests.worker.stub_model import StubLayer, StubModel, make_config, make_kv_config


class StubWorker(Worker):
    """A worker whose model needs no checkpoint."""

    def init_device(self) -> None:
        self.made_in = {threading.get_ident()}
        super().init_device()

    def load_model(self) -> None:
        self.made_in.add(threading.get_ident())
        layer = StubLayer("g0.0", salt=1)
        self.model_runner.use_model(StubModel([layer]), {"g0.0": layer})

    def fail(self) -> None:
        raise OSError("the worker's own error")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    monkeypatch.setattr(uniproc, "Worker", StubWorker)
    executor = UniProcExecutor(make_config(), checkpoint=None)
    layers = list(executor.worker.model_runner.layers.values())
    executor.initialize_from_config([make_kv_config(layers, ((4, None, 1),))])
    return executor


def step() -> SchedulerOutput:
    new = NewRequestData(
        req_id="a",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(temperature=0),
        block_ids=([1],),
        num_computed_tokens=0,
    )
    return SchedulerOutput(
        scheduled_new_reqs=[new], num_scheduled_tokens={"a": 2}, total_num_scheduled_tokens=2
    )


def backend(name: str | None) -> JubakoConfig:
    return JubakoConfig().replace(parallel_config={"distributed_executor_backend": name})


@pytest.mark.parametrize("name", [None, "uni", "jubako.executor.uniproc.UniProcExecutor"])
def test_one_process_is_the_default(name: str | None) -> None:
    assert Executor.get_class(backend(name)) is UniProcExecutor


@pytest.mark.parametrize("name", ["mp", "ray", "external_launcher"])
def test_planned_backends_are_not_built(name: str) -> None:
    with pytest.raises(ConfigError, match="not built yet; use 'uni'"):
        Executor.get_class(backend(name))


def test_unknown_backends_are_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'slurm' is unknown; there is 'uni'"):
        Executor.get_class(backend("slurm"))
    with pytest.raises(ConfigError, match="cannot be imported"):
        Executor.get_class(backend("jubako.executor.nothing.Here"))


def test_a_class_that_is_no_executor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="subclass of Executor"):
        Executor.get_class(backend("collections.OrderedDict"))


def test_more_than_one_worker_is_refused() -> None:
    config = make_config().replace(parallel_config={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="2 workers"):
        UniProcExecutor(config, checkpoint=None)


def test_both_phases_of_a_step(executor: Executor) -> None:
    expected = executor.worker.model_runner.model.greedy([1, 2], 1)
    assert executor.execute_model(step()) is None
    assert executor.sample_tokens(None).sampled_token_ids == [expected]
    assert executor.execute_model(SchedulerOutput()) is EMPTY_MODEL_RUNNER_OUTPUT


def test_a_call_that_does_not_block_is_done_when_it_returns(executor: Executor) -> None:
    future = executor.execute_model(step(), non_block=True)
    assert isinstance(future, Future)
    assert future.done()
    assert future.result() is None
    assert executor.sample_tokens(None, non_block=True).result().req_ids == ["a"]


def test_an_error_is_raised_or_kept_in_the_future(executor: Executor) -> None:
    with pytest.raises(OSError, match="own error"):
        executor.collective_rpc("fail")
    future = executor.collective_rpc("fail", non_block=True)
    with pytest.raises(OSError, match="own error"):
        future.result()


def test_a_call_gives_one_result_a_rank(executor: Executor) -> None:
    assert executor.collective_rpc("get_supported_tasks") == [("generate",)]
    assert executor.collective_rpc(lambda worker, x: (worker.rank, x), args=(5,)) == [(0, 5)]
    assert list(executor.get_kv_cache_specs()[0]) == ["g0.0"]
    assert executor.determine_available_memory()[0] > 0
    assert executor.supported_tasks == ("generate",)
    assert executor.max_concurrent_batches == 1


def test_control_calls_of_a_single_worker(executor: Executor) -> None:
    executor.check_health()
    executor.register_failure_callback(lambda: None)
    executor.execute_dummy_batch()
    executor.reset_mm_cache()
    executor.reset_encoder_cache()
    assert executor.take_draft_token_ids() is None
    assert executor.list_loras() == set()
    for call in (executor.sleep, executor.wake_up, executor.profile):
        with pytest.raises(NotImplementedFeatureError):
            call()


def test_a_shut_down_executor_says_so(executor: Executor) -> None:
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.execute_model(step())


# -- a thread of its own ------------------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    """With steps that may overlap."""
    monkeypatch.setattr(uniproc, "Worker", StubWorker)
    config = make_config().replace(scheduler_config={"async_scheduling": True})
    executor = UniProcExecutor(config, checkpoint=None)
    layers = list(executor.worker.model_runner.layers.values())
    executor.initialize_from_config([make_kv_config(layers, ((4, None, 1),))])
    yield executor
    executor.shutdown()


def thread_of(worker: Worker) -> int:
    return threading.get_ident()


def test_calls_wait_for_each_other_and_not_for_the_caller(ahead: Executor) -> None:
    assert ahead.max_concurrent_batches == 2
    expected = ahead.worker.model_runner.model.greedy([1, 2], 2)
    gate, held = threading.Event(), threading.Event()

    def hold(worker: Worker) -> None:
        held.set()
        gate.wait()

    ahead.collective_rpc(hold, non_block=True)
    held.wait()
    cached = CachedRequestData(
        req_ids=["a"], new_block_ids=[None], num_computed_tokens=[2], num_output_tokens=[1]
    )
    following = SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1
    )
    # Two steps are handed over before the first has begun; the second finds its token.
    futures = [
        ahead.execute_model(step(), non_block=True),
        ahead.sample_tokens(None, non_block=True),
        ahead.execute_model(following, non_block=True),
        ahead.sample_tokens(None, non_block=True),
    ]
    assert not any(future.done() for future in futures)
    gate.set()
    assert futures[0].result() is None
    assert futures[1].result().sampled_token_ids == [expected[:1]]
    assert futures[2].result() is None
    assert futures[3].result().sampled_token_ids == [expected[1:]]


def test_one_thread_does_all_the_work(ahead: Executor, executor: Executor) -> None:
    (here,) = executor.collective_rpc(thread_of)
    (there,) = ahead.collective_rpc(thread_of)
    assert here == threading.get_ident() != there
    assert ahead.collective_rpc(thread_of, non_block=True).result() == [there]
    assert ahead.worker.made_in == {there}


def test_a_call_that_blocks_keeps_its_place(ahead: Executor) -> None:
    future = ahead.execute_model(step(), non_block=True)
    assert ahead.sample_tokens(None).req_ids == ["a"]
    assert future.done()
    with pytest.raises(OSError, match="own error"):
        ahead.collective_rpc("fail")
    failed = ahead.collective_rpc("fail", non_block=True)
    with pytest.raises(OSError, match="own error"):
        failed.result()


def test_the_second_phase_of_a_step_that_failed_gives_nothing(ahead: Executor) -> None:
    unknown = CachedRequestData(req_ids=["nobody"], num_computed_tokens=[1])
    failed = ahead.execute_model(SchedulerOutput(scheduled_cached_reqs=unknown), non_block=True)
    assert ahead.sample_tokens(None, non_block=True).result() is None
    with pytest.raises(KeyError):
        failed.result()


def test_a_thread_ends_with_its_executor(ahead: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    future = ahead.execute_model(step(), non_block=True)
    ahead.shutdown()
    ahead.shutdown()
    assert future.result() is None
    assert not any(t.name.startswith("worker") for t in threading.enumerate())
    with pytest.raises(RuntimeError, match="shut down"):
        ahead.execute_model(step())


def test_a_failing_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(StubWorker):
        def load_model(self) -> None:
            raise OSError("no weights")

    monkeypatch.setattr(uniproc, "Worker", Broken)
    config = make_config().replace(scheduler_config={"async_scheduling": True})
    with pytest.raises(OSError, match="no weights"):
        UniProcExecutor(config, checkpoint=None)
    assert not any(t.name.startswith("worker") for t in threading.enumerate())
