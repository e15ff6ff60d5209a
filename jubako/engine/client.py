"""How does a front end talk to an engine core, in its own process or in another?

`InprocClient` calls the core directly. `SyncMPClient` and `AsyncMPClient` talk to the core's
process over two sockets; when that process ends, every call that waits for it, and every later one,
raises `EngineDeadError` at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from jubako.config import JubakoConfig
from jubako.engine.error_report import ErrorReport
from jubako.engine.handshake import Usage
from jubako.engine.interrupts import interrupts_deferred
from jubako.engine.launcher import CoreProcess
from jubako.engine.messages import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    UtilityOutput,
)
from jubako.engine.serialization import Frame, MsgpackDecoder, MsgpackEncoder, SerializationError
from jubako.engine.threads import set_own_wait_policy
from jubako.engine.utility import (
    DEFAULT_UTILITY_TIMEOUT,
    UtilityCall,
    UtilityTimeoutError,
    convert_arguments,
    utility_method,
)
from jubako.engine.wire import ENGINE_CORE_DEAD, RequestType, engine_identity
from jubako.errors import EngineDeadError, JubakoError

if TYPE_CHECKING:
    from jubako.checkpoint.info import Checkpoint
    from jubako.engine.core import EngineCore

logger = logging.getLogger(__name__)

_STOP = b"stop"

_LAST_WORDS_TIMEOUT = 0.5
"""Seconds that outputs may take to arrive after the process that sent them has ended."""

_READ_AT_ONCE = 16
"""Messages read from a socket before other coroutines get a turn."""


class EngineCoreClient(ABC):
    """What a front end needs of an engine core.

    `ready` says what the core decided at start-up; `config` is the complete configuration.
    """

    ready: EngineCoreReady
    config: JubakoConfig

    @property
    @abstractmethod
    def dead_error(self) -> EngineDeadError | None:
        """The error that every call raises once the core has ended; None while it lives."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request to the core."""

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests by their internal ids; unknown ones are ignored, and a dead core too."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the core and free what it held. Calling it again does nothing."""


class InprocClient(EngineCoreClient):
    """The core in the calling process: `get_output` does a step."""

    def __init__(self, config: JubakoConfig, checkpoint: Checkpoint, usage: Usage = "llm") -> None:
        set_own_wait_policy()
        from jubako.engine.core import EngineCore
        from jubako.engine.setup import complete_config

        config = complete_config(config, checkpoint, usage=usage)
        log_stats = not config.observability_config.disable_log_stats
        self._core: EngineCore | None = EngineCore(config, checkpoint, log_stats=log_stats)
        self._dead_error: EngineDeadError | None = None
        self.ready = self._core.ready
        self.config = self._core.config

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Set once a step has failed, or after `shutdown`."""
        return self._dead_error

    def get_output(self) -> EngineCoreOutputs:
        """Do one step; without outputs if nothing was to be done."""
        core = self.core
        with interrupts_deferred():
            try:
                outputs, model_ran = core.step_fn()
                core.post_step(model_ran)
            except BaseException:
                # The state of scheduler and workers is not known any more.
                self._dead_error = EngineDeadError()
                raise
        delay = core.idle_delay(model_ran)
        if delay:
            time.sleep(delay)
        return (outputs or {}).get(0) or EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request for the next step."""
        self.core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests now."""
        if self._core is not None and self._dead_error is None:
            self._core.abort_requests(list(request_ids))

    def call_utility(
        self, method: str, *args: Any, timeout: float = DEFAULT_UTILITY_TIMEOUT
    ) -> Any:
        """Call an exported method of the core; the call itself takes no deadline here."""
        arguments = convert_arguments(method, list(args))
        return getattr(self.core, method)(*arguments)

    def shutdown(self) -> None:
        """Free the core."""
        core, self._core = self._core, None
        if core is not None:
            self._dead_error = self._dead_error or EngineDeadError("The engine was shut down.")
            core.shutdown()

    @property
    def core(self) -> EngineCore:
        """The core itself, for those who study it. Raises `EngineDeadError` once it has ended."""
        if self._dead_error is not None or self._core is None:
            raise _same(self._dead_error or EngineDeadError())
        return self._core


class _Inbox:
    """What comes from the core's process: outputs to `put`, answers to futures, or its end.

    Shared by the client and its threads, which must not keep the client itself alive.
    """

    def __init__(self) -> None:
        self.put: Callable[[EngineCoreOutputs | EngineDeadError], None] = lambda _: None
        self.dead_error: EngineDeadError | None = None
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._call_ids = itertools.count(1)
        self._failed = threading.Event()

    def open_call(self, method: str) -> tuple[int, Future[Any]]:
        """A new call id, and the future of its answer."""
        with self._lock:
            if self.dead_error is not None:
                raise _same(self.dead_error)
            call_id = next(self._call_ids)
            future: Future[Any] = Future()
            self._calls[call_id] = (method, future)
            return call_id, future

    def close_call(self, call_id: int) -> None:
        """Forget a call whose answer nobody waits for."""
        with self._lock:
            self._calls.pop(call_id, None)

    def receive(self, frames: Sequence[zmq.Frame]) -> None:
        """Pass on one message of the core."""
        if len(frames) == 1 and frames[0].bytes == ENGINE_CORE_DEAD:
            self.fail(EngineDeadError())
            return
        try:
            outputs = self._decoder.decode([f.buffer for f in frames])
        except SerializationError as error:
            # An answer is lost, and whoever waits for it would wait for ever.
            logger.error("The engine core sent what cannot be read. %s", error)
            self.fail(EngineDeadError())
            return
        if outputs.utility_output is not None:
            self._resolve(outputs.utility_output)
        elif outputs.outputs or outputs.scheduler_stats is not None:
            self.put(outputs)

    def _resolve(self, answer: UtilityOutput) -> None:
        with self._lock:
            method, future = self._calls.pop(answer.call_id, (None, None))
        if method is None or future is None:
            return
        try:
            if answer.failure_message is not None:
                raise msgspec.convert(answer.result, ErrorReport).to_error()
            future.set_result(msgspec.convert(answer.result, utility_method(method).result))
        except (JubakoError, msgspec.ValidationError) as error:
            future.set_exception(error)

    def process_ended(self, exit_code: int) -> None:
        """The core's process has ended, of itself if `exit_code` is not negative.

        Then what it sent last is read first; it ends with `ENGINE_CORE_DEAD`.
        """
        if exit_code >= 0:
            self._failed.wait(_LAST_WORDS_TIMEOUT)
        self.fail(EngineDeadError())

    def fail(self, error: EngineDeadError) -> None:
        """The core has ended: tell everyone who waits. Only the first call counts."""
        with self._lock:
            if self.dead_error is not None:
                return
            self.dead_error = error
            calls, self._calls = self._calls, {}
        for _, future in calls.values():
            future.set_exception(_same(error))
        self.put(error)
        self._failed.set()


class _Connection:
    """The process of the core and the sockets to it; closed once, also when it is forgotten."""

    def __init__(self, inbox: _Inbox, *, preload: bool) -> None:
        self.process = CoreProcess(inbox.process_ended, preload=preload)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.input = self.context.socket(zmq.ROUTER)
        self.output = self.context.socket(zmq.PULL)
        self.before_close: Callable[[], None] = lambda: None
        self._inbox = inbox
        self._closed = False
        self._lock = threading.Lock()
        self._encoder = MsgpackEncoder()
        try:
            for socket in (self.input, self.output):
                socket.set_hwm(0)
                socket.linger = 0
            # A message that cannot be delivered must be an error, not vanish.
            self.input.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.input.bind(self.process.input_address)
            self.output.bind(self.process.output_address)
        except BaseException:
            self.process.stop()
            raise

    def wait_for_input(self) -> None:
        """Wait until the core's input socket can be addressed."""
        while not self.input.poll(50):
            if self._inbox.dead_error is not None:
                raise _same(self._inbox.dead_error)
        self.input.recv_multipart()

    def send(self, kind: RequestType, body: object) -> None:
        """Send a message; `EngineDeadError` if the core has ended."""
        with self._lock:
            if self._inbox.dead_error is not None:
                raise _same(self._inbox.dead_error)
            frames: list[Frame] = [engine_identity(0), kind.value, *self._encoder.encode(body)]
            try:
                self.input.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                raise EngineDeadError() from None

    def close(self) -> None:
        """End the core's process and close the sockets."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._inbox.fail(EngineDeadError("The engine was shut down."))
        self.before_close()
        self.process.stop()
        with self._lock:
            self.context.destroy(linger=0)


class _MPClient(EngineCoreClient):
    """Common part of the clients of a core in another process.

    The process is started by the constructor, told what to build by `initialize`, and usable after
    `wait_until_ready`.
    """

    def __init__(self, *, preload: bool = True) -> None:
        self._inbox = _Inbox()
        self._connection = _Connection(self._inbox, preload=preload)
        self._finalizer = weakref.finalize(self, self._connection.close)

    def initialize(self, config: JubakoConfig, usage: Usage) -> None:
        """Tell the process what to build; does not wait."""
        self._connection.process.initialize(config, usage)

    def wait_until_ready(self) -> EngineCoreReady:
        """Wait until the core is built; raises what kept it from being built."""
        try:
            self.ready, self.config = self._connection.process.wait_until_ready()
            self._connection.wait_for_input()
        except BaseException:
            self.shutdown()
            raise
        return self.ready

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._connection.process.pid

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Set once the core's process has ended."""
        return self._inbox.dead_error

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; does not wait for it to be read."""
        self._connection.send(RequestType.ADD, request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Send an abort; does nothing if the core has ended."""
        if request_ids:
            with contextlib.suppress(EngineDeadError):
                self._connection.send(RequestType.ABORT, list(request_ids))

    def _open_call(self, method: str, args: Sequence[Any]) -> tuple[int, Future[Any]]:
        arguments = convert_arguments(method, list(args))
        call_id, future = self._inbox.open_call(method)
        self._connection.send(RequestType.UTILITY, UtilityCall(0, call_id, method, arguments))
        return call_id, future

    def shutdown(self) -> None:
        """End the core's process; pending calls raise `EngineDeadError`."""
        self._finalizer()


class SyncMPClient(_MPClient):
    """A core in another process, for a caller that blocks."""

    def __init__(self, *, preload: bool = True) -> None:
        super().__init__(preload=preload)
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()
        self._inbox.put = self._outputs.put
        connection = self._connection
        waker = connection.context.socket(zmq.PAIR)
        waker.linger = 0
        waker.bind("inproc://stop")
        self._reader = threading.Thread(
            target=_read_outputs, args=(connection, self._inbox), name="core-output", daemon=True
        )
        reader = self._reader

        def stop_reader() -> None:
            # Nobody listens if reading has failed.
            with contextlib.suppress(zmq.Again):
                waker.send(_STOP, zmq.NOBLOCK)
            # A client that is forgotten may be collected in any thread.
            if threading.current_thread() is not reader:
                reader.join()
            waker.close()

        connection.before_close = stop_reader
        self._reader.start()

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs, waiting for them; `EngineDeadError` once the core has ended."""
        item = self._outputs.get()
        if isinstance(item, EngineDeadError):
            # For the next caller too.
            self._outputs.put(item)
            raise _same(item)
        return item

    def call_utility(
        self, method: str, *args: Any, timeout: float = DEFAULT_UTILITY_TIMEOUT
    ) -> Any:
        """Call an exported method of the core and wait at most `timeout` seconds for its answer.

        Raises the core's error, `UtilityTimeoutError` or `EngineDeadError`.
        """
        call_id, future = self._open_call(method, args)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise
            self._inbox.close_call(call_id)
            raise _timeout(method, timeout) from None


def _read_outputs(connection: _Connection, inbox: _Inbox) -> None:
    stop = connection.context.socket(zmq.PAIR)
    stop.linger = 0
    stop.connect("inproc://stop")
    poller = zmq.Poller()
    poller.register(stop, zmq.POLLIN)
    poller.register(connection.output, zmq.POLLIN)
    try:
        while True:
            ready = dict(poller.poll())
            if stop in ready:
                return
            inbox.receive(connection.output.recv_multipart(copy=False))
            if connection.output.closed:
                return
    except Exception:
        logger.exception("Reading the engine core's outputs failed")
        inbox.fail(EngineDeadError())
    finally:
        stop.close()
        connection.output.close()


class AsyncMPClient(_MPClient):
    """A core in another process, for the coroutines of one event loop.

    The loop is that of the first call that awaits; a later call on another loop moves the client
    there if the first loop is closed.
    """

    def __init__(self, *, preload: bool = True) -> None:
        super().__init__(preload=preload)
        self._link = _LoopLink(self._connection.output, self._inbox)
        self._connection.before_close = self._link.detach

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs, waiting for them; `EngineDeadError` once the core has ended."""
        outputs = self._link.attach()
        if self._inbox.dead_error is not None and outputs.empty():
            raise _same(self._inbox.dead_error)
        item = await outputs.get()
        if isinstance(item, EngineDeadError):
            outputs.put_nowait(item)
            raise _same(item)
        return item

    async def call_utility(
        self, method: str, *args: Any, timeout: float = DEFAULT_UTILITY_TIMEOUT
    ) -> Any:
        """Call an exported method of the core and wait at most `timeout` seconds for its answer.

        Raises the core's error, `UtilityTimeoutError` or `EngineDeadError`.
        """
        self._link.attach()
        call_id, future = self._open_call(method, args)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError as error:
            if isinstance(error, JubakoError):
                raise
            raise _timeout(method, timeout) from None
        finally:
            self._inbox.close_call(call_id)


class _LoopLink:
    """Reads the output socket from an event loop, without a thread."""

    def __init__(self, socket: zmq.Socket[bytes], inbox: _Inbox) -> None:
        self._socket = socket
        self._inbox = inbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()

    def attach(self) -> asyncio.Queue[EngineCoreOutputs | EngineDeadError]:
        """Read on the running loop; the queue of what was read."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise JubakoError("An AsyncLLM works on one event loop; use it from that loop.")
            self._loop = loop
            self._outputs = asyncio.Queue()
            self._inbox.put = self._put
            if self._inbox.dead_error is None:
                loop.add_reader(self._socket.fileno(), self._read)
                # The descriptor announces changes only; messages may be there already.
                loop.call_soon(self._read)
        return self._outputs

    def _put(self, item: EngineCoreOutputs | EngineDeadError) -> None:
        loop = self._loop
        if loop is None:
            return
        if isinstance(item, EngineDeadError):
            # From the thread that watches the process; a closed loop has nobody waiting.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._outputs.put_nowait, item)
        else:
            self._outputs.put_nowait(item)

    def _read(self) -> None:
        for _ in range(_READ_AT_ONCE):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._inbox.receive(frames)
        if self._loop is not None:
            # The descriptor will not announce again what has arrived already.
            self._loop.call_soon(self._read)

    def detach(self) -> None:
        """Stop reading, and close the socket; from any thread."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            self._socket.close()
            return
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here or not loop.is_running():
            self._release(loop)
            return
        done = threading.Event()

        def release() -> None:
            self._release(loop)
            done.set()

        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(release)
            # The loop may be busy, or wait for this very thread.
            done.wait(1.0)

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._socket.closed:
            loop.remove_reader(self._socket.fileno())
            self._socket.close()


def _timeout(method: str, timeout: float) -> UtilityTimeoutError:
    return UtilityTimeoutError(
        f"The engine core did not answer {method} within {timeout:g} s; a step may take long."
    )


def _same(error: EngineDeadError) -> EngineDeadError:
    """A copy to raise: an error that is raised many times would gather all their tracebacks."""
    return EngineDeadError(error.message)
