"""What the server does when it is asked for more than it takes."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
from typing import Any

import openai
import pytest

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import FakeAsyncLLM, FakeTokenizer
from tests.serving.test_bad_input import check_error


def read_response(connection: socket.socket) -> bytes:
    """What the server sends until it has answered or closed."""
    data = b""
    while True:
        part = connection.recv(65536)
        data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        if not part or (length and len(body) >= int(length)):
            return data


def headers(**fields: Any) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


# -- bodies -----------------------------------------------------------------------------------


def test_a_large_body_is_refused_before_it_is_sent(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        # Nothing but the headers is ever sent.
        connection.sendall(headers(Content_Length=1001))
        answer = read_response(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_too_large"
    assert "1001" in error["message"]
    assert "1000" in error["message"]


def test_a_body_of_unknown_length_is_refused_when_it_gets_too_large(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(headers(Transfer_Encoding="chunked"))
        connection.sendall(b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        answer = read_response(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_large_body_sent_whole_gets_its_answer(serve: Serve) -> None:
    server = serve(max_body_bytes=100_000)
    check_error(server.complete("x" * 3_000_000), 413, "request_too_large")
    assert server.complete("a").status_code == 200


def test_a_body_of_exactly_the_limit_is_read(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    body = body[:-2] + b"x" * (1000 - len(body)) + b'"}'
    with server.client() as client:
        sent: dict[str, Any] = {
            "content": body,
            "headers": {"content-type": "application/json"},
        }
        assert len(body) == 1000
        assert client.post("/v1/completions", **sent).status_code == 200


def test_bodies_of_many_connections_are_bounded_together(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    connections = []
    try:
        for _ in range(16):
            connection = socket.create_connection(("127.0.0.1", server.port), 20)
            connections.append(connection)
            connection.sendall(headers(Content_Length=1000) + b"x" * 990)
        # Wait until the server has read what was sent: the budget is then nearly used up.
        for _ in range(1000):
            response = server.complete("a", user="x" * 200)
            if response.status_code == 429:
                break
        check_error(response, 429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) >= 1
    finally:
        for connection in connections:
            connection.close()
    for _ in range(1000):
        if server.complete("a", user="x" * 200).status_code == 200:
            break
    else:
        raise AssertionError("the budget was not given back")


def test_headers_without_end_are_cut_off(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        answer = b""
        try:
            for _ in range(100):
                connection.sendall(b"x" * 65536)
            answer = read_response(connection)
        except ConnectionError:
            # The server closed the connection while this end was still sending.
            pass
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert server.complete("a").status_code == 200


def test_bytes_that_are_no_http_get_the_one_shape(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(b"\x16\x03\x01 this is not http\r\n\r\n")
        answer = read_response(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_value"


# -- requests in flight -----------------------------------------------------------------------


def start_hanging(
    server: Served, pool: concurrent.futures.Executor, count: int, **fields: Any
) -> list[Any]:
    """Requests that the engine holds."""
    before = len(server.engine.running)
    futures = [pool.submit(server.complete, "ab", **fields) for _ in range(count)]
    server.engine.wait_for(lambda: len(server.engine.running) == before + count)
    return futures


@pytest.fixture
def pool() -> Any:
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        yield pool


def test_beyond_the_limit_of_requests_the_server_is_busy(serve: Serve, pool: Any) -> None:
    server = serve(max_queued_requests=3)
    server.engine.hold()
    held = start_hanging(server, pool, 3)
    response = server.complete("a")
    error = check_error(response, 429, "rate_limit_exceeded")
    assert "3 requests are in flight" in error["message"]
    assert int(response.headers["retry-after"]) >= 1
    check_error(server.chat("a", stream=True), 429, "rate_limit_exceeded")
    with pytest.raises(openai.RateLimitError):
        server.openai().completions.create(model="fake-model", prompt="a")
    server.engine.release()
    assert [f.result(20).status_code for f in held] == [200] * 3
    assert server.complete("a").status_code == 200


def test_every_answer_counts(serve: Serve, pool: Any) -> None:
    server = serve(max_queued_requests=4)
    server.engine.hold()
    held = start_hanging(server, pool, 1, n=3)
    check_error(server.complete(["a", "b"]), 429, "rate_limit_exceeded")
    held += start_hanging(server, pool, 1)
    check_error(server.complete("a"), 429, "rate_limit_exceeded")
    server.engine.release()
    assert [f.result(20).status_code for f in held] == [200] * 2


def test_beyond_the_limit_of_tokens_the_server_is_busy(serve: Serve, pool: Any) -> None:
    server = serve(max_queued_tokens=10)
    server.engine.hold()
    held = start_hanging(server, pool, 3)  # 3 tokens each
    check_error(server.complete("a"), 429, "rate_limit_exceeded")
    server.engine.release()
    assert [f.result(20).status_code for f in held] == [200] * 3


def test_what_never_fits_is_not_told_to_try_again(serve: Serve) -> None:
    server = serve(max_queued_requests=3, max_queued_tokens=20)
    response = server.complete("a", n=4)
    error = check_error(response, 400, "invalid_value", "n")
    assert "4 requests" in error["message"]
    assert "at most 3" in error["message"]
    check_error(server.complete("x" * 30), 400, "invalid_value", "prompt")


def test_too_many_prompts_are_refused_before_they_are_tokenised(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_queued_requests=3)
    encoded = watch_encoding(monkeypatch)
    error = check_error(server.complete(["a"] * 4), 400, "invalid_value", "prompt")
    assert "4 requests" in error["message"]
    assert not encoded


def test_many_short_prompts_are_tokenised_beside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    encoded = watch_encoding(monkeypatch)
    assert server.complete("a").status_code == 200
    loop_thread = encoded.pop()
    assert server.complete(["a" * 50] * 50).status_code == 200
    assert len(encoded) == 50
    assert loop_thread not in encoded


def watch_encoding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that tokenise from now on, one entry a text."""
    threads: list[int] = []
    encode = FakeTokenizer.encode

    def watched(self: FakeTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(FakeTokenizer, "encode", watched)
    return threads


def test_many_that_arrive_together_cannot_pass_the_limit_together(serve: Serve, pool: Any) -> None:
    server = serve(max_queued_requests=8)
    server.engine.hold()
    futures = [pool.submit(server.complete, "a") for _ in range(32)]
    done, waiting = set(), set(futures)
    while len(done) < 24:
        finished, waiting = concurrent.futures.wait(
            waiting, timeout=30, return_when=concurrent.futures.FIRST_COMPLETED
        )
        assert finished, "more than the limit were let in"
        done |= finished
    assert all(f.result().status_code == 429 for f in done)
    assert len(server.engine.running) <= 8
    server.engine.release()
    assert [f.result(20).status_code for f in waiting] == [200] * 8


def test_places_are_given_back_whatever_happens(serve: Serve) -> None:
    engine = FakeAsyncLLM()
    server = serve(engine, max_queued_requests=1)
    for _ in range(3):
        server.complete("!refuse")
        server.complete("!refuse", stream=True)
        server.complete("!boom", stream=True)
        server.complete("!error", stream=True)
        server.complete("!error")
        server.complete("a", stream=True)
    assert server.complete("a").status_code == 200


# -- concurrency ------------------------------------------------------------------------------


def test_64_streaming_clients_get_each_its_own_text(serve: Serve, pool: Any) -> None:
    server = serve()
    client = server.openai()

    def stream(i: int) -> str:
        chunks = client.completions.create(
            model="fake-model", prompt=f"number {i}", max_tokens=20, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    assert list(pool.map(stream, range(64))) == [f"number {i}" for i in range(64)]
    assert server.engine.running == set()
    assert server.engine.aborted == []
