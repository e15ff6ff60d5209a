"""Clients that announce a body and do not send it."""

from __future__ import annotations

import socket

from tests.serving.conftest import Serve
from tests.serving.fake_engine import FakeAsyncLLM


def test_a_body_that_does_not_come_is_not_waited_for(serve: Serve) -> None:
    server = serve(FakeAsyncLLM(), body_timeout=0.2)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Content-Length: 100\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head.encode() + b'{"prompt": ')
        answer = b""
        # The server closes, so that what is left of the body is not taken for a request.
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert b"within 0.2 seconds" in answer
    assert server.complete("hi").status_code == 200
