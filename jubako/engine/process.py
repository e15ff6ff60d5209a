"""What does the engine core do in a process of its own?

The main thread steps the core and sends its outputs; encoding and sending a step's outputs takes
less time than handing them to another thread would. The input thread reads and prepares requests
while a step runs. A third thread watches for the end of the parent.

Signals: an interrupt from the terminal is the parent's business. The first SIGTERM ends the process
when its open requests are done, a second one after the current step. When the parent ends, or
closes the pipe on standard input, the process ends after the current step.
"""

from __future__ import annotations

import signal

# Before anything that takes time: an interrupt during start-up must not print a traceback.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import argparse
import contextlib
import enum
import gc
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from jubako.engine.error_report import ErrorReport
from jubako.engine.handshake import Hello, Init, Ready
from jubako.engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityOutput,
)
from jubako.engine.serialization import Frame, MsgpackDecoder, MsgpackEncoder, SerializationError
from jubako.engine.utility import UtilityCall, convert_arguments
from jubako.engine.wire import ENGINE_CORE_DEAD, RequestType, engine_identity
from jubako.errors import JubakoError

if TYPE_CHECKING:
    from jubako.engine.core import EngineCore

logger = logging.getLogger(__name__)

OUTPUT_LINGER_MS = 4000
"""How long the last outputs may take to leave when the process ends."""

FORCED_EXIT_DELAY = 5.0
"""Seconds that a step may still take after the parent has gone."""


class _Control(enum.Enum):
    """Items of the input queue that no client sends."""

    WAKE = enum.auto()
    STOP = enum.auto()


class EngineCoreProc:
    """Connects an `EngineCore` to the sockets of its front ends and runs it."""

    def __init__(
        self, core: EngineCore, context: zmq.Context[zmq.Socket[bytes]], init: Init
    ) -> None:
        self.core = core
        self._input_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._encoder = MsgpackEncoder()
        self._draining = False
        self._stopped = False
        self._linger = OUTPUT_LINGER_MS
        self._outputs = [_connect_output(context, a) for a in init.output_addresses]
        self._input_thread = threading.Thread(
            target=self._read_inputs,
            args=(context, init.input_addresses),
            name="core-input",
            daemon=True,
        )
        self._input_thread.start()
        core.executor.register_failure_callback(self._fail)

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Step until told to stop, and tell every front end. An error of the core is raised."""
        try:
            while not self._stopped:
                self._handle_inputs()
                if not self._stopped:
                    self._step()
        finally:
            self._broadcast([ENGINE_CORE_DEAD])

    def _step(self) -> None:
        outputs, model_ran = self.core.step_fn()
        for client_index, client_outputs in (outputs or {}).items():
            self._send(client_index, client_outputs)
        self.core.post_step(model_ran)
        delay = self.core.idle_delay(model_ran)
        if delay:
            with contextlib.suppress(queue.Empty):
                self._handle(self._input_queue.get(timeout=delay))

    def _handle_inputs(self) -> None:
        while not self._stopped:
            if self._draining and not (self.core.has_work() or self._is_frozen()):
                self._stopped = True
                return
            try:
                item = self._input_queue.get(block=not self.core.has_work())
            except queue.Empty:
                return
            self._handle(item)

    def _is_frozen(self) -> bool:
        """Whether open requests wait for the scheduler to be resumed."""
        return self.core.is_scheduler_paused() and self.core.has_unfinished_requests()

    def _handle(self, item: Any) -> None:
        if item is _Control.STOP:
            self._stopped = True
        elif item is _Control.WAKE:
            pass
        elif isinstance(item, Exception):
            raise item
        elif isinstance(item, UtilityCall):
            self._answer(item)
        elif isinstance(item, list):
            self.core.abort_requests(item)
        elif self._draining:
            self.core.refuse(item, "The engine is shutting down.")
        else:
            self.core.add(item)

    def _answer(self, call: UtilityCall) -> None:
        answer = UtilityOutput(call.call_id)
        try:
            arguments = convert_arguments(call.method, call.args)
            answer.result = getattr(self.core, call.method)(*arguments)
        except Exception as error:
            if not isinstance(error, JubakoError):
                logger.exception("Utility call %s failed", call.method)
            report = ErrorReport.of(error, f"The engine core failed in {call.method}.")
            answer.failure_message = report.message
            answer.result = report
        self._send(call.client_index, EngineCoreOutputs(utility_output=answer))

    # -- sockets ------------------------------------------------------------------------------

    def _send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        if not 0 <= client_index < len(self._outputs):
            logger.error("No front end has index %d; its outputs are dropped", client_index)
            return
        self._send_frames(self._outputs[client_index], self._encoder.encode(outputs))

    def _broadcast(self, frames: Sequence[Frame]) -> None:
        for socket in self._outputs:
            self._send_frames(socket, frames)

    def _send_frames(self, socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
        # Nobody to send to means that this front end has gone: nothing waits for the answer.
        with contextlib.suppress(zmq.Again):
            socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _read_inputs(self, context: zmq.Context[zmq.Socket[bytes]], addresses: list[str]) -> None:
        decoders = _InputDecoders()
        poller = zmq.Poller()
        sockets = [_connect_input(context, address) for address in addresses]
        try:
            for socket in sockets:
                poller.register(socket, zmq.POLLIN)
            while True:
                for socket, _ in poller.poll():
                    self._read_input(decoders, socket.recv_multipart(copy=False))
        except zmq.ContextTerminated:
            pass
        except Exception as error:
            # Without its input the core is useless; let the loop end it.
            self._input_queue.put(error)
        finally:
            for socket in sockets:
                socket.close(0)

    def _read_input(self, decoders: _InputDecoders, frames: list[zmq.Frame]) -> None:
        try:
            kind, message = decoders.decode([f.buffer for f in frames])
        except SerializationError as error:
            logger.error("A message from a front end is dropped. %s", error)
            sender = _sender_of([f.buffer for f in frames])
            if sender is not None:
                # Whoever sent it would wait for ever.
                self._input_queue.put(self.core.unreadable(*sender))
            return
        if kind is RequestType.ABORT:
            # Twice on purpose: a running step looks at the first, the second keeps the order with
            # additions that are still in the queue.
            self.core.abort_soon(message)
            self._input_queue.put(message)
        elif kind is RequestType.ADD:
            self._input_queue.put(self.core.prepare(message))
        else:
            self._input_queue.put(message)

    # -- ending -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Make `run` return after the current step, since nobody reads outputs any more.

        May be called from any thread.
        """
        self._linger = 0
        self._input_queue.put(_Control.STOP)

    def _fail(self) -> None:
        """The executor cannot work any more."""
        self._input_queue.put(JubakoError("The workers have ended."))

    def drain(self) -> None:
        """Make `run` return when the open requests are done; called again, after this step.

        Fit for a signal handler.
        """
        self._input_queue.put(_Control.STOP if self._draining else _Control.WAKE)
        self._draining = True

    def close(self) -> None:
        """Let the last outputs leave, and close the sockets that `run` used."""
        for socket in self._outputs:
            socket.close(self._linger)


class _InputDecoders:
    """Reads messages of front ends."""

    def __init__(self) -> None:
        self._add = MsgpackDecoder(EngineCoreRequest)
        self._abort = MsgpackDecoder(list[str])
        self._utility = MsgpackDecoder(UtilityCall)

    def decode(self, frames: Sequence[Frame]) -> tuple[RequestType, Any]:
        """The kind of a message and its body; `SerializationError` if it is neither."""
        try:
            kind = RequestType(bytes(frames[0]) if frames else b"")
        except ValueError:
            raise SerializationError("Not a message of a front end.") from None
        if kind is RequestType.ADD:
            return kind, self._add.decode(frames[1:])
        if kind is RequestType.ABORT:
            return kind, self._abort.decode(frames[1:])
        return kind, self._utility.decode(frames[1:])


def _sender_of(frames: Sequence[Frame]) -> tuple[str, int] | None:
    """Id and front end of a request that is no `EngineCoreRequest`, if as much can be read."""
    if len(frames) < 2 or bytes(frames[0]) != RequestType.ADD.value:
        return None
    try:
        fields = msgspec.msgpack.decode(frames[1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        return None
    place = EngineCoreRequest.__struct_fields__.index("client_index")
    client_index = fields[place] if len(fields) > place else 0
    return fields[0], client_index if isinstance(client_index, int) else 0


def _connect_output(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.linger = OUTPUT_LINGER_MS
    socket.connect(address)
    return socket


def _connect_input(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.linger = 0
    socket.setsockopt(zmq.IDENTITY, engine_identity(0))
    socket.connect(address)
    # A ROUTER can address a peer only after it has heard from it.
    socket.send(b"")
    return socket


class _ParentWatch:
    """Notices that the parent has gone, by the end of the pipe on standard input.

    A process forked by the parent may hold the pipe open, so the parent's id is looked at too.
    """

    def __init__(self, directory: Path, parent: int) -> None:
        self._directory = directory
        self._parent = parent
        self._proc: EngineCoreProc | None = None
        self._lock = threading.Lock()
        self._gone = False
        threading.Thread(target=self._watch, name="core-parent", daemon=True).start()

    def guard(self, proc: EngineCoreProc) -> None:
        """Stop `proc` when the parent has gone."""
        with self._lock:
            self._proc = proc
            if self._gone:
                proc.stop()

    def _watch(self) -> None:
        import select

        while os.getppid() == self._parent:
            readable, _, _ = select.select([0], [], [], 1.0)
            if readable and not os.read(0, 1):
                break
        with self._lock:
            self._gone = True
            if self._proc is not None:
                self._proc.stop()
            else:
                self._exit()
        time.sleep(FORCED_EXIT_DELAY)
        self._exit()

    def _exit(self) -> None:
        self.clean_up()
        os._exit(1)

    def clean_up(self) -> None:
        """Remove the sockets' directory if the parent, whose duty that is, has gone."""
        if self._gone:
            shutil.rmtree(self._directory, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine core that is told what to build over the socket at the given address."""
    parser = argparse.ArgumentParser(prog="python -m jubako.engine.process")
    parser.add_argument("handshake", help="ZMQ address of the launcher.")
    parser.add_argument("parent", type=int, help="Process id of the launcher.")
    parser.add_argument(
        "--preload", action="store_true", help="Load PyTorch before being told what to build."
    )
    arguments = parser.parse_args(argv)
    directory = Path(arguments.handshake.removeprefix("ipc://")).parent
    watch = _ParentWatch(directory, arguments.parent)
    # Start-up makes objects that stay; looking for cycles among them only takes time.
    gc.disable()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handshake = context.socket(zmq.DEALER)
    handshake.linger = OUTPUT_LINGER_MS
    handshake.setsockopt(zmq.IDENTITY, engine_identity(0))
    handshake.connect(arguments.handshake)
    encoder = MsgpackEncoder()
    handshake.send_multipart(encoder.encode(Hello(os.getpid())))
    try:
        proc, ready = _build(context, handshake, preload=arguments.preload)
    except Exception as error:
        if not isinstance(error, JubakoError):
            logger.exception("The engine core could not start")
        text = f"The engine core could not start: {type(error).__name__}: {error}"
        handshake.send_multipart(encoder.encode(ErrorReport.of(error, text)))
        context.destroy(OUTPUT_LINGER_MS)
        return 1
    gc.enable()
    signal.signal(signal.SIGTERM, lambda *_: proc.drain())
    handshake.send_multipart(encoder.encode(ready))
    handshake.close(OUTPUT_LINGER_MS)
    watch.guard(proc)
    try:
        proc.run()
    except Exception:
        logger.exception("The engine core failed")
        return 1
    finally:
        proc.close()
        context.term()
        watch.clean_up()
        proc.core.shutdown()
    return 0


def _build(
    context: zmq.Context[zmq.Socket[bytes]], handshake: zmq.Socket[bytes], *, preload: bool
) -> tuple[EngineCoreProc, Ready]:
    started = time.perf_counter()
    if preload:
        import torch  # noqa: F401 - while the launcher still reads the checkpoint
    loaded = time.perf_counter()
    init = MsgpackDecoder(Init).decode(handshake.recv_multipart())
    from jubako.utils.logging import setup_logging

    setup_logging(init.config.observability_config.log_level)
    from jubako.checkpoint.info import open_checkpoint
    from jubako.engine.core import EngineCore
    from jubako.engine.setup import complete_config

    checkpoint = open_checkpoint(init.config.model_config.model)
    config = complete_config(init.config, checkpoint, usage=init.usage)
    opened = time.perf_counter()
    log_stats = not config.observability_config.disable_log_stats
    core = EngineCore(config, checkpoint, log_stats=log_stats)
    seconds = {"load_libraries": loaded - started, "open_checkpoint": opened - loaded}
    core.ready.startup_seconds = seconds | core.ready.startup_seconds
    return EngineCoreProc(core, context, init), Ready(core.ready, core.config)


if __name__ == "__main__":
    exit_code = main()
    # Taking PyTorch apart piece by piece would keep whoever waits for this process waiting.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
