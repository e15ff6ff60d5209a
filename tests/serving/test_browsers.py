"""Pages of other origins, and HTTPS."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from jubako.config import ServerConfig
from jubako.entrypoints.server.run import open_listener
from jubako.errors import ConfigError
from tests.serving.conftest import Serve
from tests.serving.fake_engine import FakeAsyncLLM

ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


def test_a_page_of_an_allowed_origin_may_ask(serve: Serve) -> None:
    server = serve(api_key="secret", allowed_origins=(ORIGIN,))
    with server.client() as client:
        asked = client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers[ALLOWED] == ORIGIN
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        headers = {"Origin": ORIGIN, "Authorization": "Bearer secret"}
        answer = client.get("/v1/models", headers=headers)
        assert answer.headers[ALLOWED] == ORIGIN
        assert client.get("/v1/models", headers={"Origin": ORIGIN}).status_code == 401


@pytest.mark.parametrize("origins", [(), (ORIGIN,)])
def test_a_page_of_another_origin_may_not(serve: Serve, origins: tuple[str, ...]) -> None:
    server = serve(allowed_origins=origins)
    other = PREFLIGHT | {"Origin": "https://other.example"}
    with server.client() as client:
        asked = client.options("/v1/chat/completions", headers=other)
        assert asked.status_code in (400, 405)
        assert ALLOWED not in asked.headers


def test_https_is_spoken_with_a_certificate(serve: Serve, tmp_path: Path) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    certificate = tmp_path / "server.pem"
    own.private_key_and_cert_chain_pem.write_to_path(str(certificate))
    server = serve(FakeAsyncLLM(), ready=False, ssl_certfile=str(certificate))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with httpx.Client(verify=context, base_url=server.url.replace("http", "https")) as client:
        for _ in range(20000):
            if client.get("/ready").status_code == 200:
                break
        assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_a_certificate_that_cannot_be_used_is_said_before_anything_starts(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for path in (str(broken), str(tmp_path / "missing.pem")):
        with pytest.raises(ConfigError, match="ssl_certfile"):
            open_listener(ServerConfig(port=0, ssl_certfile=path))
    with pytest.raises(ConfigError, match="needs ssl_certfile"):
        ServerConfig(ssl_keyfile="key.pem")
