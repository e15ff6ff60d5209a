"""What does the server know about itself: is it up, whom does it serve, how much is in flight?"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jubako.config import ServerConfig
from jubako.entrypoints.default_sampling import default_sampling_values
from jubako.entrypoints.server.errors import ServerError
from jubako.errors import EngineBusyError, EngineDeadError, ValidationError
from jubako.frontend.answers.registry import ModelStyle, model_style

if TYPE_CHECKING:
    from jubako.frontend.async_llm import AsyncLLM

Output = TypeVar("Output")

BODIES_AT_ONCE = 16
"""How many bodies of the largest size may be in memory at once."""


class Phase(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Open requests finish, new ones are refused."""


class Admission:
    """Counts requests and prompt tokens in flight, and refuses what exceeds the limits.

    A place is taken before the engine hears of a request, so that many that arrive at once cannot
    pass the limit together.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def check_size(self, requests: int, tokens: int, parameter: str) -> None:
        """Raise `ValidationError` for what would not fit even into an idle server."""
        for count, limit, _, what in self._places(requests, tokens):
            if count > limit:
                raise ValidationError(
                    f"This asks for {count} {what} at once, and the server takes at most {limit}; "
                    "send less in one request.",
                    parameter,
                    count,
                )

    def admit(self, requests: int, tokens: int, parameter: str) -> Callable[[], None]:
        """Take places for `requests` with `tokens` in all; call the result to give them back.

        Raises `EngineBusyError` if they do not fit now, `ValidationError` if they never do.
        """
        self.check_size(requests, tokens, parameter)
        for count, limit, taken, what in self._places(requests, tokens):
            if taken + count > limit:
                raise EngineBusyError(
                    f"The server is busy: {taken} {what} are in flight, and at most {limit} may "
                    "be. Try again shortly."
                )
        self.requests += requests
        self.tokens += tokens
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self.requests -= requests
                self.tokens -= tokens

        return release

    def _places(self, requests: int, tokens: int) -> tuple[tuple[int, int, int, str], ...]:
        return (
            (requests, self.max_requests, self.requests, "requests"),
            (tokens, self.max_tokens, self.tokens, "prompt tokens"),
        )


def _starting() -> ServerError:
    return ServerError("starting", "The model is still being loaded; try again shortly.")


def _last_part(model: str) -> str:
    """`model`, a path or a name, without folders and the ending of a file."""
    return Path(model).name.removesuffix(".gguf") or model


class BodyBudget:
    """Counts bytes of request bodies that are being read, over all connections."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0

    def take(self, size: int) -> None:
        """`size` more bytes have been read; raises `EngineBusyError` if that is too many."""
        if self._bytes + size > self._limit:
            raise EngineBusyError("The server is busy reading other requests. Try again shortly.")
        self._bytes += size

    def give_back(self, size: int) -> None:
        """A body of `size` bytes has been read whole, or given up."""
        self._bytes -= size


class ServerState:
    """Shared by all endpoints of one server.

    `chat_template` is the text of a template that replaces the model's own.
    """

    def __init__(self, config: ServerConfig, chat_template: str | None = None) -> None:
        self.config = config
        self.chat_template = chat_template
        self.phase = Phase.STARTING
        self.created = int(time.time())
        self.bodies = BodyBudget(BODIES_AT_ONCE * config.max_body_bytes)
        self.admission = Admission(config.max_queued_requests, config.max_queued_tokens)
        self.model_name = ""
        self.model_names: set[str] = set()
        """What clients may call the model, `model_name` among them."""
        self.sampling_defaults: dict[str, Any] = {}
        self.request_ids: Counter[str] = Counter()
        """Ids of the requests that the engine is working on; clients may repeat each other's."""
        self.model_style: ModelStyle = model_style(None)
        """How the model marks calls and thoughts in its answers."""
        self._engine: AsyncLLM | None = None
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def set_engine(self, engine: AsyncLLM) -> None:
        """The engine has started; requests are welcome."""
        self._engine = engine
        model_config = engine.config.model_config
        given = engine.ready.model
        # A path of this machine is not for clients to see; those who know it may use it.
        self.model_name = model_config.served_model_name or _last_part(given)
        self.model_names = {self.model_name, model_config.served_model_name or given}
        self.sampling_defaults = default_sampling_values(model_config.generation_config)
        self.model_style = model_style(
            self.chat_template or engine.tokenizer.chat_template,
            self.config.tool_call_parser,
            self.config.reasoning_parser,
        )
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    @property
    def engine(self) -> AsyncLLM:
        """The engine; raises an error fit for the client when it cannot be used."""
        if self._engine is None:
            raise _starting()
        if self._engine.errored:
            raise self._engine.dead_error or EngineDeadError()
        return self._engine

    @property
    def started_engine(self) -> AsyncLLM | None:
        """The engine, dead or alive, if it has started."""
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self.engine.ready.max_model_len

    def check_accepting(self) -> None:
        """Raise unless new requests are welcome."""
        if self.phase is Phase.STARTING:
            raise _starting()
        if self.phase is Phase.DRAINING:
            raise self.draining()

    @staticmethod
    def draining() -> ServerError:
        """What is said to those who come too late."""
        return ServerError("draining", "The server is shutting down; try another one.")

    # -- engine requests ----------------------------------------------------------------------

    async def running(
        self, request_id: str, source: AsyncGenerator[Output, None]
    ) -> AsyncGenerator[Output, None]:
        """`source`, the outputs of an engine request that counts as running until it is closed."""
        self.request_ids[request_id] += 1
        try:
            async with aclosing(source):
                async for output in source:
                    yield output
        finally:
            self.request_ids -= Counter([request_id])

    # -- open exchanges -----------------------------------------------------------------------

    def exchange_begins(self) -> None:
        """A request was accepted; a drain waits for it."""
        self._open += 1
        self._idle.clear()

    def exchange_ends(self) -> None:
        """Its response has gone out, or its client."""
        self._open -= 1
        if self._open == 0:
            self._idle.set()

    @property
    def open_exchanges(self) -> int:
        """Requests accepted and not yet answered whole."""
        return self._open

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no exchange is open; False if `timeout` seconds were not enough."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True
