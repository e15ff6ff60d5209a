"""How the server starts, drains, ends, and dies with its engine."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from jubako.errors import ModelNotFoundError
from tests.serving.conftest import Serve, events_of
from tests.serving.fake_engine import FakeAsyncLLM
from tests.serving.test_bad_input import check_error

PATIENCE = 20_000
"""How often a condition is looked at before a test gives up."""


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


def until(condition: Callable[[], bool]) -> None:
    for _ in range(PATIENCE):
        if condition():
            return
    raise AssertionError("it never happened")


# -- start ------------------------------------------------------------------------------------


def test_before_the_model_is_loaded_the_server_says_so(serve: Serve) -> None:
    loaded = threading.Event()
    engine = FakeAsyncLLM()

    def start() -> FakeAsyncLLM:
        assert loaded.wait(30)
        return engine

    server = serve(engine, start, ready=False)
    with server.client() as client:
        for path in ("/health", "/ready", "/v1/models", "/v1/models/fake-model"):
            response = client.get(path)
            check_error(response, 503, "starting")
            assert int(response.headers["retry-after"]) >= 1
        check_error(server.complete("a", model="any"), 503, "starting")
        assert client.get("/version").status_code == 200
        assert client.get("/metrics").status_code == 200
        loaded.set()
        server.wait_ready()
        assert client.get("/health").status_code == 200
        assert server.complete("a").status_code == 200


def test_an_engine_that_does_not_start_ends_the_server(serve: Serve) -> None:
    def start() -> FakeAsyncLLM:
        raise ModelNotFoundError("There is no model.")

    raised: list[BaseException] = []
    previous = threading.excepthook
    threading.excepthook = lambda args: raised.append(args.exc_value)  # type: ignore[arg-type]
    try:
        server = serve(FakeAsyncLLM(), start, ready=False)
        server.thread.join(20)
    finally:
        threading.excepthook = previous
    assert [str(e) for e in raised] == ["There is no model."]


# -- drain ------------------------------------------------------------------------------------


def test_a_drain_lets_open_requests_finish_and_refuses_new_ones(
    serve: Serve, pool: concurrent.futures.Executor
) -> None:
    server = serve(drain_timeout=30.0)
    server.engine.hold()
    open_request = pool.submit(server.complete, "ab")
    open_stream = pool.submit(server.complete, "ab", stream=True)
    server.engine.wait_for(lambda: len(server.engine.running) == 2)
    server.server.stop()
    with server.client() as client:
        until(lambda: client.get("/ready").status_code == 503)
        response = client.get("/ready")
        check_error(response, 503, "draining")
        assert int(response.headers["retry-after"]) >= 1
        check_error(server.complete("a"), 503, "draining")
        check_error(server.chat("a", stream=True), 503, "draining")
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
    server.engine.release()
    assert open_request.result(20).json()["choices"][0]["text"] == "ab"
    assert events_of(open_stream.result(20).text)[-1] == "[DONE]"
    assert server.join() == 0
    assert server.engine.shut_down
    with pytest.raises(httpx.ConnectError):
        server.complete("a")


def test_what_does_not_finish_in_time_is_told(
    serve: Serve, pool: concurrent.futures.Executor
) -> None:
    server = serve(drain_timeout=0.2)
    server.engine.hold()
    open_request = pool.submit(server.complete, "ab")
    open_stream = pool.submit(server.complete, "ab", stream=True)
    server.engine.wait_for(lambda: len(server.engine.running) == 2)
    server.server.stop()
    check_error(open_request.result(20), 503, "draining")
    stream = open_stream.result(20)
    if stream.status_code == 200:
        # Its status had gone out already.
        assert json.loads(events_of(stream.text)[-2])["error"]["code"] == "draining"
        assert events_of(stream.text)[-1] == "[DONE]"
    else:
        check_error(stream, 503, "draining")
    assert server.join() == 0


def test_clients_that_use_the_same_id_are_all_told(
    serve: Serve, pool: concurrent.futures.Executor
) -> None:
    server = serve(drain_timeout=0.2)
    server.engine.hold()
    open_request = pool.submit(server.complete, "ab", request_id="mine")
    server.engine.wait_for(lambda: len(server.engine.running) == 1)
    assert server.complete("!refuse", request_id="mine").status_code == 400
    server.server.stop()
    check_error(open_request.result(20), 503, "draining")
    assert server.join() == 0
    # The engine was asked to end it; else the server's last moment would have.
    assert server.engine.abort_requested == {"cmpl-mine"}


def test_a_second_signal_ends_at_once(serve: Serve, pool: concurrent.futures.Executor) -> None:
    server = serve(drain_timeout=3600.0)
    server.engine.hold()
    request = pool.submit(server.complete, "ab")
    server.engine.wait_for(lambda: len(server.engine.running) == 1)
    server.server.stop()
    with server.client() as client:
        until(lambda: client.get("/ready").status_code == 503)
    server.server.stop()
    check_error(request.result(20), 503, "draining")
    assert server.join() == 128 + signal.SIGTERM


# -- death ------------------------------------------------------------------------------------


def test_the_engines_death_is_told_to_everyone_and_ends_the_server(
    serve: Serve, pool: concurrent.futures.Executor
) -> None:
    server = serve()
    server.engine.hold()
    client = server.openai()
    stream = client.completions.create(model="fake-model", prompt="abcdef", stream=True)
    server.engine.release(1)
    assert next(iter(stream)).choices[0].text == "a"
    waiting = pool.submit(server.complete, "ab")
    server.engine.wait_for(lambda: len(server.engine.running) == 2)
    server.engine.die()
    with pytest.raises(openai.APIError) as error:
        list(stream)
    assert error.value.code == "engine_dead"
    check_error(waiting.result(20), 503, "engine_dead")
    with server.client() as http:
        for path in ("/health", "/ready", "/v1/models"):
            check_error(http.get(path), 503, "engine_dead")
        check_error(server.complete("a"), 503, "engine_dead")
    assert server.join() == 1


def test_an_engine_that_dies_during_a_drain_ends_the_server_with_1(
    serve: Serve, pool: concurrent.futures.Executor
) -> None:
    server = serve()
    server.engine.hold()
    waiting = pool.submit(server.complete, "ab")
    server.engine.wait_for(lambda: len(server.engine.running) == 1)
    server.server.stop()
    server.engine.die()
    check_error(waiting.result(20), 503, "engine_dead")
    assert server.join() == 1


# -- signals, in a process of its own ---------------------------------------------------------


class Process:
    """The stand-in server."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.stand_in_server", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=20).status_code
        except httpx.TransportError:
            return 0

    def end(self) -> tuple[int, str]:
        """Exit code and what was written on standard error."""
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log


@pytest.fixture
def start_process() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        process = Process(*arguments)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(
    start_process: Callable[..., Process],
    pool: concurrent.futures.Executor,
    number: signal.Signals,
) -> None:
    process = start_process("normal")
    until(lambda: process.status("/ready") == 200)

    def stream() -> str:
        body: dict[str, Any] = {"prompt": "abc", "stream": True}
        return httpx.post(process.url + "/v1/completions", json=body, timeout=20).text

    answer = pool.submit(stream)
    until(lambda: _open_requests(process) == 1)
    process.process.send_signal(number)
    until(lambda: process.status("/ready") == 503)
    process.tell("release")
    assert events_of(answer.result(20))[-1] == "[DONE]"
    code, log = process.end()
    assert code == 0, log
    assert "Traceback" not in log


def _open_requests(process: Process) -> int:
    text = httpx.get(process.url + "/metrics", timeout=20).text
    line = next(line for line in text.splitlines() if line.startswith("http_requests_open "))
    return int(float(line.split()[1]))


def test_a_signal_while_the_model_loads_ends_with_0(start_process: Callable[..., Process]) -> None:
    process = start_process("never-starts")
    until(lambda: process.status("/ready") == 503)
    process.process.send_signal(signal.SIGTERM)
    code, log = process.end()
    assert code == 0, log
    assert "Traceback" not in log


def test_the_engines_death_ends_the_process_with_1(start_process: Callable[..., Process]) -> None:
    process = start_process("normal")
    until(lambda: process.status("/ready") == 200)
    process.tell("die")
    until(lambda: process.status("/health") == 503)
    code, log = process.end()
    assert code == 1, log
    assert "engine core has stopped" in log
    assert "Traceback" not in log


def test_a_second_signal_ends_the_process_with_its_number(
    start_process: Callable[..., Process], pool: concurrent.futures.Executor
) -> None:
    process = start_process("normal")
    until(lambda: process.status("/ready") == 200)
    answer = pool.submit(httpx.post, process.url + "/v1/completions", json={"prompt": "abc"})
    until(lambda: _open_requests(process) == 1)
    process.process.send_signal(signal.SIGTERM)
    until(lambda: process.status("/ready") == 503)
    process.process.send_signal(signal.SIGTERM)
    code, log = process.end()
    assert code == 128 + signal.SIGTERM, log
    check_error(answer.result(20), 503, "draining")
    assert "Traceback" not in log


def test_an_engine_that_does_not_start_ends_the_process(
    start_process: Callable[..., Process],
) -> None:
    process = start_process("fails")
    code, log = process.end()
    assert code == 1
    assert "Traceback" not in log
