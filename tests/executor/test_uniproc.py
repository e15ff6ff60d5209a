"""One worker in the caller's process."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from jubako.config import JubakoConfig
from jubako.errors import ConfigError, NotImplementedFeatureError
from jubako.executor import uniproc
from jubako.executor.executor import Executor
from jubako.executor.uniproc import UniProcExecutor
from jubako.sampling_params import SamplingParams
from jubako.scheduler.model_output import EMPTY_MODEL_RUNNER_OUTPUT
from jubako.scheduler.output import NewRequestData, SchedulerOutput
from jubako.worker.worker import Worker
from tests.worker.stub_model import StubLayer, StubModel, make_config, make_kv_config


class StubWorker(Worker):
    """A worker whose model needs no checkpoint."""

    def load_model(self) -> None:
        self.calls = ["load_model"]
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
