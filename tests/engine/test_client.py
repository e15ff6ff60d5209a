"""A core in its own process: requests, utilities, and above all its death."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from jubako.engine import launcher
from jubako.engine.client import AsyncMPClient, InprocClient, SyncMPClient
from jubako.engine.core import EngineCore
from jubako.engine.interrupts import interrupts_deferred
from jubako.engine.launcher import CoreProcess, make_socket_directory
from jubako.engine.messages import EngineCoreRequest, FinishReason
from jubako.engine.utility import UTILITY_METHODS, UtilityTimeoutError
from jubako.engine.wire import engine_identity
from jubako.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    JubakoError,
    ModelNotFoundError,
    NotImplementedFeatureError,
)
from jubako.sampling_params import SamplingParams
from jubako.scheduler import LoRARequest
from tests.engine.conftest import MakeConfig
from tests.engine.fakes import (
    DIE,
    EOS,
    FAIL,
    HANG,
    INTERRUPT,
    LOSE_WORKERS,
    MAX_MODEL_LEN,
    SLOW,
    continuation,
)

DEADLINE = 10.0
"""Seconds after which a call counts as hanging."""


def request(request_id: str, prompt: list[int], **options: Any) -> EngineCoreRequest:
    options.setdefault("max_tokens", 5)
    params = SamplingParams(temperature=0, **options)
    return EngineCoreRequest(request_id, prompt, None, params, None, EOS, 0.0)


def start(config: Any) -> SyncMPClient:
    client = SyncMPClient(preload=False)
    client.initialize(config, "llm")
    client.wait_until_ready()
    return client


@pytest.fixture(scope="module")
def client(make_config: MakeConfig) -> Iterator[SyncMPClient]:
    """A core that no test may end."""
    client = start(make_config())
    yield client
    client.shutdown()


@pytest.fixture
def doomed(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncMPClient]:
    """A core for a test that ends it, and that gets little time to end by itself."""
    monkeypatch.setattr(launcher, "STOP_TIMEOUT", 0.5)
    client = start(make_config())
    yield client
    client.shutdown()


def read(client: SyncMPClient, count: int) -> dict[str, list[Any]]:
    """Outputs by request, until `count` requests have ended."""
    found: dict[str, list[Any]] = {}
    while sum(o[-1].finished for o in found.values()) < count:
        for output in client.get_output().outputs:
            found.setdefault(output.request_id, []).append(output)
    return found


def read_one(client: SyncMPClient, request_id: str) -> list[Any]:
    """All outputs of one request; an aborted one may have ended before its abort came."""
    found: list[Any] = []
    while not (found and found[-1].finished):
        found += [o for o in client.get_output().outputs if o.request_id == request_id]
    return found


class Background:
    """A call in a thread, whose result or error can be awaited for a limited time."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.result = call()
        except BaseException as error:
            self.result = error

    def wait(self) -> Any:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the call hangs"
        return self.result


def forever(call: Callable[[], Any]) -> None:
    while True:
        call()


async def ask_for_ever(client: AsyncMPClient) -> None:
    while True:
        await client.call_utility("check_health", timeout=0.1)


async def read_for_ever(client: AsyncMPClient) -> None:
    while True:
        await client.get_output()


def make_stuck(client: SyncMPClient) -> None:
    """Send what never ends, and return when the core is in that step."""
    client.add_request(request("stuck", [HANG]))
    with pytest.raises(UtilityTimeoutError, match="check_health"):
        forever(lambda: client.call_utility("check_health", timeout=0.1))


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for something that another process does."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.01)


# -- work -------------------------------------------------------------------------------------


def test_a_client_may_be_closed_by_the_thread_that_reads(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    # As when it is forgotten, and that thread is the one that collects it.
    client = start(make_config())
    core = psutil.Process(client.pid)
    reader = client._reader
    client._inbox.put = lambda _: client.shutdown()
    client.add_request(request("a", [5, 6]))
    reader.join(DEADLINE)
    assert not reader.is_alive()
    assert not core.is_running()
    assert not caplog.records


@pytest.mark.parametrize("client_index", [0, 7])
def test_a_request_that_cannot_be_read_is_answered(client: SyncMPClient, client_index: int) -> None:
    bad = request("unreadable", [5, 6])
    bad.client_index = client_index
    bad.arrival_time = "yesterday"  # type: ignore[assignment]
    client.add_request(bad)
    client.add_request(request("good", [5, 6]))
    found = Background(lambda: read(client, 2 if client_index == 0 else 1)).wait()
    assert found["good"][-1].finish_reason is FinishReason.LENGTH
    if client_index == 0:
        assert found["unreadable"][-1].finish_reason is FinishReason.ERROR
        assert "cannot be read" in found["unreadable"][-1].error


def test_requests_are_answered(client: SyncMPClient) -> None:
    prompts = {"short": [5, 6, 7], "long": list(range(3, 60))}
    for name, prompt in prompts.items():
        client.add_request(request(name, prompt, logprobs=2))
    found = read(client, 2)
    for name, prompt in prompts.items():
        tokens = [t for o in found[name] for t in o.new_token_ids]
        assert tokens == continuation(prompt, 5)
        assert all(o.new_logprobs.logprob_token_ids.shape == (1, 3) for o in found[name])


def test_large_arrays_arrive(client: SyncMPClient) -> None:
    client.add_request(request("large", [5] * 100, prompt_logprobs=19, logprobs=19))
    (output, *_) = read(client, 1)["large"]
    assert output.new_prompt_logprobs_tensors.logprobs.shape == (99, 20)


def test_a_bad_request_is_answered_alone(client: SyncMPClient) -> None:
    client.add_request(request("bad", [5] * MAX_MODEL_LEN))
    client.add_request(request("good", [5]))
    found = read(client, 2)
    assert found["bad"][0].finish_reason is FinishReason.ERROR
    assert found["good"][-1].finish_reason is FinishReason.LENGTH


def test_abort(client: SyncMPClient) -> None:
    for turn in range(3):
        client.add_request(request(f"aborted {turn}", [5], max_tokens=None))
        client.abort_requests([f"aborted {turn}", "unknown"])
        client.abort_requests([])
        client.add_request(request(f"kept {turn}", [6]))
        assert len(read_one(client, f"kept {turn}")) == 5
    wait_until(lambda: client.call_utility("get_request_counts") == (0, 0))


def test_utilities_have_typed_results(client: SyncMPClient) -> None:
    assert client.call_utility("check_health") is True
    assert client.call_utility("get_request_counts") == (0, 0)
    assert client.call_utility("get_supported_tasks") == ["generate"]
    assert client.call_utility("reset_prefix_cache", True, False) is True


@pytest.mark.parametrize("name", ["shutdown", "__init__", "executor", "step", ""])
def test_only_exported_methods_can_be_called(client: SyncMPClient, name: str) -> None:
    with pytest.raises(JubakoError, match="no utility method"):
        client.call_utility(name)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("sleep", (1,)),
        ("wake_up", ()),
        ("profile", (True,)),
        ("add_lora", (LoRARequest("name", 1),)),
        ("remove_lora", (1,)),
        ("pin_lora", (1,)),
    ],
)
def test_what_the_workers_cannot_do_is_a_typed_error(
    client: SyncMPClient, method: str, args: tuple[Any, ...]
) -> None:
    with pytest.raises(NotImplementedFeatureError, match="not built"):
        client.call_utility(method, *args)


def test_control_calls(client: SyncMPClient) -> None:
    assert client.call_utility("list_loras") == set()
    for method in ("execute_dummy_batch", "reset_mm_cache", "reset_encoder_cache"):
        assert client.call_utility(method) is None


def test_every_exported_method_exists_and_takes_what_the_table_says() -> None:
    for name, method in UTILITY_METHODS.items():
        parameters = list(inspect.signature(getattr(EngineCore, name)).parameters.values())[1:]
        assert len(parameters) == len(method.arguments), name
        required = [p for p in parameters if p.default is inspect.Parameter.empty]
        assert len(required) == method.num_required, name


def test_arguments_are_checked(client: SyncMPClient) -> None:
    with pytest.raises(JubakoError, match="add_lora takes 1 arguments, got 0"):
        client.call_utility("add_lora")
    with pytest.raises(JubakoError, match="bool"):
        client.call_utility("reset_prefix_cache", "yes")
    with pytest.raises(JubakoError, match="takes 0"):
        client.call_utility("check_health", 1)


def test_the_core_checks_names_itself(client: SyncMPClient) -> None:
    """A front end of another make may send anything."""
    connection, inbox = client._connection, client._inbox
    for body in ([0, 1, "shutdown", []], [0, 1, "reset_prefix_cache", ["x"]], [0, 1, 5, []]):
        call_id, future = inbox.open_call("check_health")
        body[1] = call_id
        frames = [engine_identity(0), b"\x03", msgspec.msgpack.encode(body)]
        connection.input.send_multipart(frames)
        if isinstance(body[2], str):
            with pytest.raises(JubakoError, match=body[2]):
                future.result(DEADLINE)
    assert client.call_utility("check_health")


def test_garbage_on_the_socket_changes_nothing(client: SyncMPClient) -> None:
    for frames in ([b""], [b"\x00"], [b"\x07", b"x"], [b"\x00", b"\xff" * 50], [b"\x01", b"\x05"]):
        client._connection.input.send_multipart([engine_identity(0), *frames])
    client.add_request(request("after garbage", [5]))
    assert len(read_one(client, "after garbage")) == 5


# -- start ------------------------------------------------------------------------------------


def test_sockets_are_for_this_user_only(client: SyncMPClient) -> None:
    directory = client._connection.process.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_long_path_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(launcher.tempfile, "tempdir", str(long))
    directory = make_socket_directory()
    assert len(str(directory)) < 80
    assert list(long.iterdir()) == []
    directory.rmdir()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": "/nowhere/model"}, ModelNotFoundError, "no model"),
        ({"max_model_len": 10_000}, ConfigError, "10000"),
        ({"num_gpu_blocks_override": 1}, ConfigError, "max_model_len"),
        ({"distributed_executor_backend": "no.such.module"}, ConfigError, "no.such"),
    ],
)
def test_what_keeps_the_core_from_starting_is_raised(
    make_config: MakeConfig, options: dict[str, Any], error: type[JubakoError], text: str
) -> None:
    client = SyncMPClient(preload=False)
    client.initialize(make_config(**options), "llm")
    with pytest.raises(error, match=text) as caught:
        client.wait_until_ready()
    assert "\n" not in caught.value.message
    assert not psutil.pid_exists(client.pid)


def test_a_damaged_model(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    client = SyncMPClient(preload=False)
    client.initialize(make_config(model=str(tmp_path)), "llm")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        client.wait_until_ready()


def test_death_during_the_start(make_config: MakeConfig) -> None:
    client = SyncMPClient(preload=False)
    os.kill(client.pid, signal.SIGKILL)
    client.initialize(make_config(), "llm")
    with pytest.raises(JubakoError, match="SIGKILL"):
        client.wait_until_ready()


def test_shutdown_before_and_during_the_start(make_config: MakeConfig) -> None:
    for initialize in (False, True):
        client = SyncMPClient(preload=False)
        directory = client._connection.process.directory
        if initialize:
            client.initialize(make_config(), "llm")
        client.shutdown()
        assert not psutil.pid_exists(client.pid)
        assert not directory.exists()


# -- death ------------------------------------------------------------------------------------


def test_a_killed_core_ends_every_pending_call(doomed: SyncMPClient) -> None:
    make_stuck(doomed)
    output = Background(doomed.get_output)
    second = Background(doomed.get_output)
    utility = Background(lambda: doomed.call_utility("check_health", timeout=1000))
    wait_until(lambda: len(doomed._inbox._calls) == 1)
    os.kill(doomed.pid, signal.SIGKILL)
    for call in (output, second, utility):
        assert isinstance(call.wait(), EngineDeadError)
    assert isinstance(doomed.dead_error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        doomed.add_request(request("late", [5]))
    with pytest.raises(EngineDeadError):
        doomed.call_utility("check_health")
    with pytest.raises(EngineDeadError):
        doomed.get_output()
    doomed.abort_requests(["stuck"])


def test_a_core_that_dies_in_a_step(doomed: SyncMPClient) -> None:
    doomed.add_request(request("a", [DIE]))
    with pytest.raises(EngineDeadError):
        read(doomed, 1)


def test_a_failing_step_ends_the_core_and_its_text_stays_there(doomed: SyncMPClient) -> None:
    doomed.add_request(request("a", [FAIL]))
    with pytest.raises(EngineDeadError) as caught:
        read(doomed, 1)
    assert "secret" not in caught.value.message
    wait_until(lambda: not psutil.pid_exists(doomed.pid))


def test_workers_that_end_take_the_core_along(doomed: SyncMPClient) -> None:
    doomed.add_request(request("a", [LOSE_WORKERS], max_tokens=100))
    with pytest.raises(EngineDeadError):
        forever(doomed.get_output)


def test_a_core_that_does_not_answer(doomed: SyncMPClient) -> None:
    make_stuck(doomed)
    assert doomed._inbox._calls == {}


def test_async_calls_end_with_the_core(make_config: MakeConfig) -> None:
    client = AsyncMPClient(preload=False)
    client.initialize(make_config(), "server")
    client.wait_until_ready()

    async def main() -> None:
        client.add_request(request("a", [5]))
        outputs = []
        while not outputs or not outputs[-1].finished:
            outputs += (await client.get_output()).outputs
        assert [t for o in outputs for t in o.new_token_ids] == continuation([5], 5)
        assert await client.call_utility("get_request_counts") == (0, 0)
        client.add_request(request("b", [HANG]))
        with pytest.raises(UtilityTimeoutError):
            await ask_for_ever(client)
        calls = [
            asyncio.ensure_future(read_for_ever(client)),
            asyncio.ensure_future(read_for_ever(client)),
            asyncio.ensure_future(client.call_utility("check_health", timeout=1000)),
        ]
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE)
        assert all(isinstance(r, EngineDeadError) for r in results)
        with pytest.raises(EngineDeadError):
            await client.get_output()
        with pytest.raises(EngineDeadError):
            await client.call_utility("check_health")

    asyncio.run(main())
    client.shutdown()


def test_death_between_two_event_loops(make_config: MakeConfig) -> None:
    client = AsyncMPClient(preload=False)
    client.initialize(make_config(), "server")
    client.wait_until_ready()

    async def one(name: str) -> None:
        client.add_request(request(name, [5], max_tokens=1))
        while not (await client.get_output()).outputs:
            pass

    asyncio.run(one("a"))
    asyncio.run(one("b"))
    os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: client.dead_error is not None)
    with pytest.raises(EngineDeadError):
        asyncio.run(client.get_output())
    client.shutdown()


# -- end --------------------------------------------------------------------------------------


def test_shutdown_leaves_nothing_behind(doomed: SyncMPClient) -> None:
    directory = doomed._connection.process.directory
    doomed.add_request(request("a", [5], max_tokens=None))
    waiting = Background(lambda: read(doomed, 2))
    doomed.shutdown()
    assert isinstance(waiting.wait(), EngineDeadError)
    assert not psutil.pid_exists(doomed.pid)
    assert not directory.exists()
    names = {t.name for t in threading.enumerate()}
    doomed.shutdown()
    with pytest.raises(EngineDeadError):
        doomed.add_request(request("b", [5]))
    assert not directory.exists()
    assert not any(n.startswith("core-") for n in names - threads_of_other_clients())


def threads_of_other_clients() -> set[str]:
    """The module's client lives while these tests run."""
    return {"core-monitor", "core-output"}


def test_a_forgotten_client_ends_its_core(make_config: MakeConfig) -> None:
    client = start(make_config())
    pid, directory = client.pid, client._connection.process.directory
    del client
    assert not psutil.pid_exists(pid)
    assert not directory.exists()


def test_a_core_that_does_not_end_is_killed(doomed: SyncMPClient) -> None:
    make_stuck(doomed)
    doomed.shutdown()
    assert not psutil.pid_exists(doomed.pid)


def test_sigterm_lets_open_requests_finish(doomed: SyncMPClient) -> None:
    doomed.add_request(request("a", [5], max_tokens=100))
    first = doomed.get_output()
    os.kill(doomed.pid, signal.SIGTERM)
    outputs = [*first.outputs, *read(doomed, 1)["a"]]
    assert [t for o in outputs for t in o.new_token_ids] == continuation([5], 100)
    with pytest.raises(EngineDeadError):
        forever(doomed.get_output)


def test_sigterm_waits_for_requests_that_a_pause_keeps(doomed: SyncMPClient) -> None:
    doomed.add_request(request("a", [SLOW], max_tokens=100))
    first = doomed.get_output()
    doomed.call_utility("pause_scheduler")
    os.kill(doomed.pid, signal.SIGTERM)
    # It still answers: whoever paused it may go on.
    assert doomed.call_utility("is_scheduler_paused") is True
    doomed.call_utility("resume_scheduler")
    outputs = [*first.outputs, *read(doomed, 1)["a"]]
    assert [t for o in outputs for t in o.new_token_ids] == continuation([SLOW], 100)
    with pytest.raises(EngineDeadError):
        forever(doomed.get_output)


# -- steps that overlap -----------------------------------------------------------------------


@pytest.fixture
def ahead(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncMPClient]:
    """A core that plans a step before the last one has come back."""
    monkeypatch.setattr(launcher, "STOP_TIMEOUT", 0.5)
    client = start(make_config(async_scheduling=True))
    yield client
    client.shutdown()


def test_overlapping_steps_give_the_same_outputs(ahead: SyncMPClient) -> None:
    prompts = {f"{i}": [5 + i, 6] * (1 + 3 * i) for i in range(9)}
    for name, prompt in prompts.items():
        ahead.add_request(request(name, prompt, max_tokens=20))
    found = Background(lambda: read(ahead, len(prompts))).wait()
    for name, prompt in prompts.items():
        assert [t for o in found[name] for t in o.new_token_ids] == continuation(prompt, 20)
    wait_until(lambda: ahead.call_utility("get_request_counts") == (0, 0))
    ahead.call_utility("pause_scheduler")
    ahead.add_request(request("late", [5, 6]))
    wait_until(lambda: ahead.call_utility("get_request_counts") == (0, 1))
    ahead.call_utility("resume_scheduler")
    (late,) = read(ahead, 1).values()
    assert [t for o in late for t in o.new_token_ids] == continuation([5, 6], 5)
    ahead.add_request(request("aborted", [5], max_tokens=None))
    ahead.get_output()
    ahead.abort_requests(["aborted"])
    wait_until(lambda: ahead.call_utility("get_request_counts") == (0, 0))
    assert ahead.call_utility("reset_prefix_cache") is True
    os.kill(ahead.pid, signal.SIGTERM)
    with pytest.raises(EngineDeadError):
        forever(ahead.get_output)


def test_a_failing_step_among_overlapping_ones_ends_the_core(ahead: SyncMPClient) -> None:
    ahead.add_request(request("a", [5], max_tokens=100))
    ahead.get_output()
    ahead.add_request(request("b", [FAIL]))
    waiting = Background(lambda: forever(ahead.get_output))
    error = waiting.wait()
    assert isinstance(error, EngineDeadError)
    assert "secret" not in error.message


def test_sigint_is_the_parents_business(client: SyncMPClient) -> None:
    os.kill(client.pid, signal.SIGINT)
    assert client.call_utility("check_health")


PARENT = """
import sys
from jubako.config import JubakoConfig
from jubako.engine.client import SyncMPClient
client = SyncMPClient(preload=False)
client.initialize(JubakoConfig.from_options({options}), "llm")
if {ready}:
    client.wait_until_ready()
print(client.pid, client._connection.process.directory, flush=True)
{end}
"""


def run_parent(model_folder: Path, ready: bool, end: str) -> tuple[Any, int, Path]:
    options = {
        "model": str(model_folder),
        "device": "cpu",
        "distributed_executor_backend": "tests.engine.fakes.FakeExecutor",
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(options=options, ready=ready, end=end)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    return parent, int(pid), Path(directory)


@pytest.mark.parametrize("ready", [True, False])
def test_a_killed_parent_takes_its_core_along(model_folder: Path, ready: bool) -> None:
    parent, pid, directory = run_parent(model_folder, ready, "sys.stdin.read()")
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(pid))
    wait_until(lambda: not directory.exists())


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_a_parent_that_ends_without_shutdown_leaves_nothing(model_folder: Path, end: str) -> None:
    parent, pid, directory = run_parent(model_folder, True, end)
    parent.wait(DEADLINE)
    assert not is_running(pid)
    assert not directory.exists()


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an entry that nobody has collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- the core in this process -----------------------------------------------------------------


def test_inproc(make_config: MakeConfig, checkpoint: Any) -> None:
    client = InprocClient(make_config(), checkpoint)
    client.add_request(request("a", [5]))
    client.add_request(request("b", [6]))
    client.abort_requests(["b"])
    found: list[Any] = []
    while not found or not found[-1].finished:
        found += client.get_output().outputs
    assert [t for o in found for t in o.new_token_ids] == continuation([5], 5)
    assert client.call_utility("check_health") is True
    with pytest.raises(JubakoError, match="no utility method"):
        client.call_utility("shutdown")
    client.shutdown()
    client.shutdown()
    client.abort_requests(["a"])
    with pytest.raises(EngineDeadError):
        client.get_output()


def test_inproc_is_dead_after_a_failing_step(make_config: MakeConfig, checkpoint: Any) -> None:
    client = InprocClient(make_config(), checkpoint)
    client.add_request(request("a", [FAIL]))
    with pytest.raises(RuntimeError):
        client.get_output()
    with pytest.raises(EngineDeadError):
        client.add_request(request("b", [5]))
    client.shutdown()


def test_an_interrupt_waits_for_the_end_of_the_step(
    make_config: MakeConfig, checkpoint: Any
) -> None:
    client = InprocClient(make_config(), checkpoint)
    client.add_request(request("a", [INTERRUPT]))
    with pytest.raises(KeyboardInterrupt):
        client.get_output()
    tokens = [t for _ in range(4) for o in client.get_output().outputs for t in o.new_token_ids]
    assert tokens == continuation([INTERRUPT], 5)[1:]
    client.add_request(request("b", [INTERRUPT, INTERRUPT]))
    with pytest.raises(KeyboardInterrupt):
        client.get_output()
    assert client.dead_error is None
    client.shutdown()


def test_a_second_interrupt_does_not_wait() -> None:
    reached = []

    def interrupt_twice() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_starting_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(Path(launcher.tempfile.gettempdir()).glob("jubako-*"))
    monkeypatch.setattr(launcher.sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        CoreProcess(lambda code: None)
    assert set(Path(launcher.tempfile.gettempdir()).glob("jubako-*")) == before
    assert zmq.IPC_PATH_MAX_LEN > 0
