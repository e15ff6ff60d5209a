"""A server in a thread, with a fake engine behind it, on a free port of the loopback interface."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from jubako.config import ServerConfig
from jubako.entrypoints.server.run import HttpServer, open_listener
from tests.serving.fake_engine import FakeAsyncLLM


@dataclass
class Served:
    """A running server, its engine, and clients for it."""

    engine: FakeAsyncLLM
    server: HttpServer
    port: int
    thread: threading.Thread
    exit_code: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        # Nothing here is encrypted; loading certificates for every client would take long.
        return httpx.Client(base_url=self.url, timeout=30, verify=False, **options)

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        return openai.OpenAI(base_url=self.url + "/v1", **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt} | fields)

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages} | fields)

    def wait_ready(self) -> None:
        with self.client() as client:
            for _ in range(20000):
                if client.get("/ready").status_code == 200:
                    return
        raise AssertionError("the server never became ready")

    def join(self) -> int:
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server did not end"
        return self.exit_code[0]


Serve = Callable[..., Served]


def events_of(text: str) -> list[str]:
    """The data of the server-sent events in the body of a response."""
    events = text.split("\n\n")
    assert events.pop() == "", "the last event is not complete"
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


@contextlib.contextmanager
def _servers() -> Iterator[Serve]:
    running: list[Served] = []

    def start_server(
        engine: FakeAsyncLLM | None = None,
        start: Callable[[], Any] | None = None,
        ready: bool = True,
        **fields: Any,
    ) -> Served:
        engine = engine or FakeAsyncLLM()
        config = ServerConfig(**{"port": 0, "drain_timeout": 5.0} | fields)
        listener = open_listener(config)
        server = HttpServer(config, start or (lambda: engine), listener)  # type: ignore[arg-type]
        served = Served(engine, server, listener.getsockname()[1], threading.Thread())

        def run() -> None:
            served.exit_code.append(server.run())

        served.thread = threading.Thread(target=run, daemon=True)
        listener.listen()
        served.thread.start()
        running.append(served)
        if ready:
            served.wait_ready()
        return served

    yield start_server
    for served in running:
        served.engine.release()
        served.server.stop()
        served.server.stop()
    for served in running:
        served.thread.join(20)
        assert not served.thread.is_alive(), "a server did not end"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers: `serve(engine=None, start=None, ready=True, **fields of ServerConfig)`."""
    with _servers() as serve:
        yield serve


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Serve]:
    """The same, for servers that all tests of a module share."""
    with _servers() as serve:
        yield serve
