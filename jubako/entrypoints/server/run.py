"""How does the server start, drain and end?

It listens before the model is loaded, answering 503, so that a port in use is known at once and a
load balancer sees it coming. The first SIGTERM or SIGINT drains: new requests are refused, open
ones may finish. A second one ends it at once. When the engine dies, the server says so for a moment
and ends with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector

from jubako.config import ServerConfig
from jubako.entrypoints.server.app import build_app
from jubako.entrypoints.server.exchange import settle
from jubako.entrypoints.server.http_protocol import BoundedHttpProtocol
from jubako.entrypoints.server.state import Phase, ServerState
from jubako.errors import ConfigError
from jubako.frontend.metrics import PrometheusStatLogger
from jubako.frontend.stat_log import LogStatLogger
from jubako.utils.logging import get_logger

if TYPE_CHECKING:
    from jubako.frontend.async_llm import AsyncLLM

logger = get_logger(__name__)

Result = TypeVar("Result")

EXIT_ENGINE_DEAD = 1

DEATH_CHECK_SECONDS = 0.25
DEATH_GRACE_SECONDS = 1.0
"""How long /health says that the engine is dead before the server ends."""

LAST_WORDS_SECONDS = 2.0
"""How long requests that were ended may take to be told so."""

CLOSE_TIMEOUT_SECONDS = 2
"""How long connections may take to close when the server ends."""


class _Server(uvicorn.Server):
    """uvicorn, with its signals handled here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Leave the signals alone."""
        yield


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def open_listener(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address; `ConfigError` says why there is none."""
    check_certificate(config)
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"host={config.host!r} is not an address: {error.strerror}.", "host"
        ) from None
    # A name such as localhost may stand for both; most clients try IPv4.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {config.host} port {config.port}: {error.strerror}.", "port"
        ) from None
    if config.api_key is None and not ipaddress.ip_address(address[0]).is_loopback:
        logger.warning(
            "Listening on %s without an API key: everybody who can reach this machine can use the "
            "model. Set --api-key, or listen on 127.0.0.1.",
            config.host,
        )
    return listener


def check_certificate(config: ServerConfig) -> None:
    """Raise `ConfigError` unless the files of the certificate can be used."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile!r} cannot be used: {reason}.", "ssl_certfile"
        ) from None


def read_chat_template(path: str | None) -> str | None:
    """The template in the file that --chat-template names."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"chat_template={path!r} cannot be read: {reason}.", "chat_template"
        ) from None


class HttpServer:
    """One server, from its first to its last moment.

    It serves on `listener`, a bound socket. `start_engine` is called on a thread and may take its
    time.
    """

    def __init__(
        self,
        config: ServerConfig,
        start_engine: Callable[[], AsyncLLM],
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._start_engine = start_engine
        self._listener = listener
        self._last_signal = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> int:
        """Serve until a signal, `stop` or the engine's death; the process's exit code."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(self._live())

    def stop(self) -> None:
        """What SIGTERM does, from any thread."""
        if self._loop is not None:
            _call(self._loop, self._on_signal, signal.SIGTERM)

    async def _live(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        state = ServerState(self._config, read_chat_template(self._config.chat_template))
        server = _Server(
            uvicorn.Config(
                build_app(state, registry),
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                # What goes wrong inside an exchange is logged where it is answered.
                log_level="critical",
                access_log=False,
                server_header=False,
                ssl_certfile=self._config.ssl_certfile,
                ssl_keyfile=self._config.ssl_keyfile,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_SECONDS,
            )
        )
        with self._handle_signals():
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            try:
                return await self._until_end(state, registry)
            finally:
                server.should_exit = True
                server.force_exit = self._stop.is_set()
                await serving
                engine = state.started_engine
                if engine is not None:
                    engine.shutdown()

    async def _until_end(self, state: ServerState, registry: CollectorRegistry) -> int:
        logger.info("Listening on %s; the model is being loaded", self._url())
        engine = await self._before_signal(self._load())
        if engine is None:
            return 0
        state.set_engine(engine)
        stats = PrometheusStatLogger(engine.config, engine.ready, state.model_name, registry)
        engine.stat_loggers.append(stats)
        interval = engine.config.observability_config.log_stats_interval
        if interval:
            engine.stat_loggers.append(LogStatLogger(interval))
        ready = engine.ready
        logger.info(
            "%s in %s on %s: %d KV blocks hold %d tokens of context; a request may have %d, and %d "
            "requests run at once",
            ready.architecture,
            ready.dtype,
            ready.device,
            ready.num_gpu_blocks,
            ready.kv_cache_tokens,
            ready.max_model_len,
            ready.max_num_seqs,
        )
        logger.info("Serving %s on %s", state.model_name, self._url())
        if await self._before_signal(_until_dead(engine)):
            logger.error("The engine core has stopped; the server ends.")
            await self._before_signal(asyncio.sleep(DEATH_GRACE_SECONDS))
            return EXIT_ENGINE_DEAD
        return await self._drain(state, engine)

    async def _drain(self, state: ServerState, engine: AsyncLLM) -> int:
        state.phase = Phase.DRAINING
        self._stop.clear()
        timeout = self._config.drain_timeout
        if state.open_exchanges:
            logger.info(
                "Draining: %d open requests may finish within %g s; another signal ends them now.",
                state.open_exchanges,
                timeout,
            )
        idle = await self._before_signal(state.wait_idle(timeout))
        if not idle:
            logger.warning("%d requests are ended unfinished.", state.open_exchanges)
            await engine.abort(list(state.request_ids))
            await state.wait_idle(LAST_WORDS_SECONDS)
        if engine.errored:
            return EXIT_ENGINE_DEAD
        return 0 if idle is not None else 128 + self._last_signal

    async def _load(self) -> AsyncLLM:
        # A thread of its own: those of the executor would keep the process from ending meanwhile.
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[AsyncLLM] = loop.create_future()

        def load() -> None:
            try:
                engine = self._start_engine()
            except BaseException as error:
                _call(loop, _reject, loaded, error)
            else:
                if not _call(loop, _resolve, loaded, engine):
                    engine.shutdown()

        threading.Thread(target=load, name="engine-start", daemon=True).start()
        return await loaded

    async def _before_signal(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of `work`, or None after cancelling it when a signal comes first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            await settle(stopping)
            await settle(working)

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self._last_signal = number
        self._stop.set()

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._config.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _until_dead(engine: AsyncLLM) -> bool:
    while not engine.errored:
        await asyncio.sleep(DEATH_CHECK_SECONDS)
    return True


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> bool:
    """Run `function` on `loop`, from another thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _resolve(future: asyncio.Future[AsyncLLM], engine: AsyncLLM) -> None:
    if future.cancelled():
        engine.shutdown()
    else:
        future.set_result(engine)


def _reject(future: asyncio.Future[AsyncLLM], error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)
