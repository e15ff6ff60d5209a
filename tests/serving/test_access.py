"""Who may ask what: the key, and the paths that need none."""

from __future__ import annotations

import logging

import openai
import pytest

from jubako.config import ServerConfig
from jubako.entrypoints.server.run import open_listener
from jubako.errors import ConfigError
from tests.serving.conftest import Serve, Served
from tests.serving.test_bad_input import check_error

KEY = "secret-κλειδί"
"""Keys may be any text."""


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(api_key=KEY, dev_mode=True)


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/fake-model"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/nope"),
    ],
)
def test_everything_else_needs_the_key(server: Served, method: str, path: str) -> None:
    wrong: list[dict[str, bytes]] = [
        {},
        bearer("wrong"),
        bearer(KEY + "x"),
        bearer(KEY[:-1]),
        {"Authorization": b"Bearer"},
        {"Authorization": f"Basic {KEY}".encode()},
        {"Authorization": KEY.encode()},
    ]
    with server.client() as client:
        for headers in wrong:
            response = client.request(method, path, headers=headers)
            check_error(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert KEY not in response.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_monitors_need_no_key(server: Served, path: str) -> None:
    with server.client() as client:
        assert client.get(path).status_code == 200


def test_the_key_opens(server: Served) -> None:
    with server.client(headers=bearer(KEY)) as client:
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert client.post("/reset_prefix_cache").status_code == 200
    assert server.engine.cache_resets == 1


def test_the_openai_client_sends_the_key(serve: Serve) -> None:
    server = serve(api_key="ascii")
    server.openai(api_key="ascii").completions.create(model="fake-model", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        server.openai(api_key="other").completions.create(model="fake-model", prompt="a")


def test_without_a_key_nobody_is_asked(serve: Serve) -> None:
    assert serve().complete("a").status_code == 200


def test_listening_to_the_network_without_a_key_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The handler of the capture is given to the logger itself: it may not pass records on.
    logger = logging.getLogger("jubako")
    logger.addHandler(caplog.handler)
    try:
        open_listener(ServerConfig(host="127.0.0.1", port=0)).close()
        open_listener(ServerConfig(host="0.0.0.0", port=0, api_key="k")).close()
        assert caplog.records == []
        open_listener(ServerConfig(host="0.0.0.0", port=0)).close()
    finally:
        logger.removeHandler(caplog.handler)
    assert "without an API key" in caplog.text


def test_a_port_in_use_is_said() -> None:
    with open_listener(ServerConfig(port=0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use"):
            open_listener(ServerConfig(port=port))


def test_a_host_that_is_none_is_said() -> None:
    with pytest.raises(ConfigError, match="not an address"):
        open_listener(ServerConfig(host="no such host", port=0))
