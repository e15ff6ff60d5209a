"""Which requests get through to an endpoint?

The gate is the outermost layer. It gives every exchange an id, checks the key, turns requests away
while the server drains, counts what is open, and answers in the one error shape whatever escapes
from the layers below.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jubako.entrypoints.server.errors import ServerError, error_response
from jubako.entrypoints.server.http_metrics import HTTPMetrics
from jubako.entrypoints.server.state import ServerState

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Paths that need no key: what load balancers and monitors ask."""

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Ids of clients that are taken over: printable ASCII without spaces."""


class Gate:
    """ASGI application around the routes."""

    def __init__(self, app: ASGIApp, state: ServerState, metrics: HTTPMetrics) -> None:
        self._app = app
        self._state = state
        self._metrics = metrics
        metrics.show_open(lambda: state.open_exchanges)
        key = state.config.api_key
        self._key_digest = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange."""
        if scope["type"] != "http":
            raise ServerError("not_found", "Only HTTP is spoken here.")
        began = time.perf_counter()
        request = Request(scope)
        path = request.url.path
        request_id = _request_id(request)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def tagged_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        generating = scope["method"] == "POST"
        counted = False
        try:
            self._check_key(request)
            if generating:
                self._state.check_accepting()
                self._state.exchange_begins()
                counted = True
            await self._app(scope, receive, tagged_send)
        except asyncio.CancelledError:
            # The server ends and waits for nobody any more.
            if status:
                raise
            await error_response(self._state.draining(), path)(scope, receive, tagged_send)
        except Exception as error:
            response = error_response(error, path)
            if not status:
                await response(scope, receive, tagged_send)
        finally:
            if counted:
                self._state.exchange_ends()
            self._metrics.observe(scope, status, time.perf_counter() - began)

    def _check_key(self, request: Request) -> None:
        # Before a page of another origin sends a key, its browser asks whether it may.
        open_to_all = request.url.path in OPEN_PATHS or request.method == "OPTIONS"
        if self._key_digest is None or open_to_all:
            return
        given = request.headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        if not given:
            # Anthropic's clients have a header of their own.
            scheme, token = "bearer", request.headers.get("x-api-key", "")
        # Digests have one length, so the comparison tells nothing about the key's.
        same = hmac.compare_digest(_digest(token.strip().encode("latin-1")), self._key_digest)
        if scheme.lower() != "bearer" or not same:
            raise ServerError(
                "invalid_api_key",
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' "
                "or as 'X-API-Key: KEY'.",
            )


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def request_id_of(request: Request) -> str:
    """The id that the gate gave to the exchange."""
    value: Any = request.scope["state"]["request_id"]
    return str(value)
