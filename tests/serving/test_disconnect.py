"""A client that leaves takes its work with it; a slow one is waited for without hoarding."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from jubako.entrypoints.server import exchange
from tests.serving.conftest import Serve, Served, events_of
from tests.serving.fake_engine import FakeAsyncLLM


@pytest.fixture
def server(serve: Serve) -> Served:
    server = serve(FakeAsyncLLM(max_model_len=100_000))
    server.engine.hold()
    return server


def send(server: Served, path: str, **fields: object) -> socket.socket:
    """A connection on which a request has been sent and nothing read."""
    connection = socket.create_connection(("127.0.0.1", server.port), 20)
    body = json.dumps(fields).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


def wait_aborted(server: Served, count: int) -> None:
    server.engine.wait_for(lambda: len(server.engine.aborted) == count)
    assert server.engine.running == set()
    # Its places are free, and nobody waits for it at a drain.
    server.engine.release()
    assert server.complete("a").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts(server: Served, stream: bool) -> None:
    connection = send(server, "/v1/completions", prompt="ab", stream=stream)
    server.engine.wait_for(lambda: len(server.engine.running) == 1)
    connection.close()
    wait_aborted(server, 1)


def test_leaving_in_the_middle_of_a_stream_aborts(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        server.engine.release(2)
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    wait_aborted(server, 1)


def test_leaving_aborts_every_prompt_and_answer(server: Served) -> None:
    connection = send(server, "/v1/completions", prompt=["a", "b", "c"], n=2)
    server.engine.wait_for(lambda: len(server.engine.running) == 3)
    connection.close()
    wait_aborted(server, 3)


def test_a_client_that_times_out_has_left(server: Served) -> None:
    with pytest.raises(httpx.ReadTimeout), server.client() as client:
        client.post("/v1/completions", json={"prompt": "a"}, timeout=0.05)
    wait_aborted(server, 1)


def test_half_of_many_leave_and_the_others_go_on(server: Served) -> None:
    connections = [send(server, "/v1/completions", prompt="ab", stream=True) for _ in range(20)]
    server.engine.wait_for(lambda: len(server.engine.running) == 20)
    for connection in connections[::2]:
        connection.close()
    server.engine.wait_for(lambda: len(server.engine.aborted) == 10)
    assert len(server.engine.running) == 10
    server.engine.release()
    for connection in connections[1::2]:
        data = b""
        while b"[DONE]" not in data:
            part = connection.recv(65536)
            assert part, "the stream broke off"
            data += part
        connection.close()
    assert len(server.engine.aborted) == 10


def test_leaving_while_the_body_is_sent(server: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), 20)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 1000\r\n\r\n{"prompt":'
    )
    connection.close()
    server.engine.release()
    assert server.complete("a").status_code == 200
    assert len(server.engine.requests) == 1


@pytest.fixture
def wordy_server(serve: Serve) -> Served:
    """Every chunk has the model's name: a few make more bytes than the system buffers."""
    engine = FakeAsyncLLM(max_model_len=100_000)
    engine.config = engine.config.replace(model_config={"served_model_name": "m" * 4000})
    return serve(engine)


LONG_STREAM = {"prompt": "x" * 3000, "max_tokens": 3000, "stream": True}


def test_a_slow_reader_slows_its_own_stream_only(wordy_server: Served) -> None:
    """The engine's outputs are not taken faster than the client reads them."""
    server = wordy_server
    connection = send(server, "/v1/completions", **LONG_STREAM)
    server.engine.wait_for(lambda: len(server.engine.requests) == 1)
    # Others are served meanwhile, and the slow one's generator stands still.
    assert server.complete("abc").json()["choices"][0]["text"] == "abc"
    assert len(server.engine.running) == 1
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += connection.recv(1 << 20)
    connection.close()
    assert data.count(b'"text":"x"') == 3000
    server.engine.wait_for(lambda: not server.engine.running)
    assert server.engine.aborted == []


def test_a_reader_that_never_reads_and_leaves_is_aborted(wordy_server: Served) -> None:
    server = wordy_server
    connection = send(server, "/v1/completions", **LONG_STREAM)
    server.engine.wait_for(lambda: len(server.engine.running) == 1)
    assert server.complete("abc").status_code == 200
    connection.close()
    wait_aborted(server, 1)


def test_a_stream_begins_though_its_request_waits(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client in a queue learns that it was accepted; what goes wrong later is an event."""
    monkeypatch.setattr(exchange, "HEADERS_WITHIN_SECONDS", 0.01)
    body = {"prompt": "abc", "stream": True}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        assert len(server.engine.running) == 1
        server.engine.die()
        events = events_of(response.read().decode())
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["error"]["code"] == "engine_dead"
