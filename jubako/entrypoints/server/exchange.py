"""What happens to a request's work when its client leaves, and how does a stream go out?

A client that disconnects cancels the work of its request, streaming or not; the cancellation
reaches the engine as an abort. A stream is written at the pace at which the client reads: nothing
is taken from the engine while the last event has not gone out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jubako.entrypoints.server.errors import error_body

Result = TypeVar("Result")


def _error_event(error: BaseException) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


@dataclass(frozen=True)
class StreamStyle:
    """How an interface ends a stream and tells of an error in it; by default as OpenAI's."""

    last: bytes = b"data: [DONE]\n\n"
    error: Callable[[BaseException], bytes] = _error_event


HEADERS_WITHIN_SECONDS = 1.0
"""How long the status of a stream may wait for its first event.

Until then an error still gets a status of its own; a client whose request waits longer, in a queue,
learns at least that it was accepted.
"""


class ClientLeft(Exception):  # noqa: N818 - nothing failed
    """The client closed the connection before it was answered."""


async def settle(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended, however it ends."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, or `ClientLeft` after cancelling it when the client goes first.

    The request's body must have been received whole.
    """
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        await settle(listening)
        await settle(working)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events:
    """A generator of server-sent events whose first one has been waited for, within limits."""

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        self._source = source
        self._first = asyncio.ensure_future(self._next())

    async def _next(self) -> bytes | None:
        return await anext(self._source, None)

    async def start(self) -> None:
        """Wait for the first event or a little while; raises what went wrong until then."""
        try:
            done, _ = await asyncio.wait({self._first}, timeout=HEADERS_WITHIN_SECONDS)
            if done:
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def all(self) -> AsyncGenerator[bytes, None]:
        """Every event, the first included."""
        first = await self._first
        if first is not None:
            yield first
        async for event in self._source:
            yield event

    async def aclose(self) -> None:
        """End the generator, wherever it is."""
        await settle(self._first)
        await self._source.aclose()


class EventStream(Response):
    """Server-sent events in the style of their interface; an error is an event as well.

    `released` is called once when the exchange has ended, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        released: Callable[[], None],
        headers: dict[str, str],
        style: StreamStyle,
    ) -> None:
        # Like every response without a length, this one leaves out the parent's constructor.
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._events = events
        self._released = released
        self._style = style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the events until they end or the client leaves."""
        try:
            await until_disconnect(receive, self._write(send))
        except ClientLeft:
            pass
        finally:
            try:
                await self._events.aclose()
            finally:
                self._released()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._events.all()) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            event = self._style.error(error)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": self._style.last, "more_body": False})
