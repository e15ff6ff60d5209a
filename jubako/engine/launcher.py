"""How is the core's process started, watched and ended?

The process is started before anything else is known, so that it loads its libraries while the
caller reads the checkpoint; `initialize` then tells it what to build. Its standard input is a pipe
from the caller that never carries a byte: its end is how the core learns that its parent is gone,
whatever ended it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import zmq

from jubako.config import JubakoConfig
from jubako.engine.error_report import ErrorReport
from jubako.engine.handshake import FromCore, Hello, Init, Ready, Usage
from jubako.engine.messages import EngineCoreReady
from jubako.engine.serialization import MsgpackDecoder, MsgpackEncoder
from jubako.engine.threads import set_wait_policy
from jubako.errors import JubakoError

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 5.0
"""Seconds that the core may take to end when told to, before it is killed."""

_PROCESS_MODULE = "jubako.engine.process"
_POLL_MS = 50


def make_socket_directory() -> Path:
    """A new directory for sockets, which only this user can enter."""
    path = tempfile.mkdtemp(prefix="jubako-")
    if len(path) + len("/handshake.sock") > zmq.IPC_PATH_MAX_LEN:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="jubako-", dir="/tmp")
    return Path(path)


class CoreProcess:
    """The process of one engine core, from its start to its end.

    `on_death` is called once, with the exit code and from a thread of its own, if the process ends
    after start-up without having been told to.
    """

    def __init__(self, on_death: Callable[[int], None], *, preload: bool = True) -> None:
        self._on_death = on_death
        self.directory = make_socket_directory()
        self.input_address = f"ipc://{self.directory}/input0.sock"
        self.output_address = f"ipc://{self.directory}/output0.sock"
        self._handshake_address = f"ipc://{self.directory}/handshake.sock"
        self._ready: Future[Ready] = Future()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._stop_lock = threading.Lock()
        try:
            self._process = self._spawn(preload)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self._handshake_thread: threading.Thread | None = None
        self._monitor = threading.Thread(target=self._watch, name="core-monitor", daemon=True)
        self._monitor.start()

    def _spawn(self, preload: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", _PROCESS_MODULE]
        command += [self._handshake_address, str(os.getpid())]
        if preload:
            command.append("--preload")
        # A new interpreter that imports from the same places, wherever this one was started.
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        environment = os.environ | {"PYTHONPATH": path}
        set_wait_policy(environment)
        return subprocess.Popen(  # noqa: S603 - the command is made here
            command,
            stdin=subprocess.PIPE,
            # What a library prints must not mix with the answers on the caller's standard output.
            stdout=2,
            env=environment,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def initialize(self, config: JubakoConfig, usage: Usage) -> None:
        """Tell the process what to build; does not wait for it."""
        assert self._handshake_thread is None, "a core is initialised once"
        thread = threading.Thread(
            target=self._handshake, args=(config, usage), name="core-handshake", daemon=True
        )
        thread.start()
        # Only now: the other thread joins what it finds here.
        self._handshake_thread = thread

    def wait_until_ready(self) -> tuple[EngineCoreReady, JubakoConfig]:
        """What the core decided, once it is built; or the error that kept it from being built."""
        message = self._ready.result()
        return message.ready, message.config

    def stop(self) -> None:
        """End the process, by force if it does not end in time, and remove the sockets' files."""
        with self._stop_lock:
            self._stopping.set()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            if not self._ready.done():
                # It holds nothing yet, and may be deep in loading a library.
                self._process.kill()
            if not self._ended.wait(STOP_TIMEOUT):
                self._process.kill()
                self._ended.wait()
            if self._handshake_thread is not None:
                self._handshake_thread.join()
            shutil.rmtree(self.directory, ignore_errors=True)

    # -- threads ------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._process.wait()
        self._ended.set()
        if self._handshake_thread is not None:
            self._handshake_thread.join()
        started = self._ready.done() and self._ready.exception() is None
        if started and not self._stopping.is_set():
            logger.error("The engine core (process %d) %s.", self.pid, self._how_it_ended())
            self._on_death(self._process.returncode)

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        known = {s.value: s.name for s in signal.Signals}
        text = f"was killed by {known.get(-code, f'signal {-code}')}"
        return text + " (out of memory?)" if code == -signal.SIGKILL else text

    def _handshake(self, config: JubakoConfig, usage: Usage) -> None:
        try:
            self._ready.set_result(self._exchange(config, usage))
        except Exception as error:
            self._ready.set_exception(error)

    def _exchange(self, config: JubakoConfig, usage: Usage) -> Ready:
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder[FromCore](FromCore)  # type: ignore[arg-type]
        with (
            zmq.Context(io_threads=1) as context,
            context.socket(zmq.ROUTER) as socket,
        ):
            socket.linger = 0
            socket.bind(self._handshake_address)
            while True:
                if not socket.poll(_POLL_MS):
                    self._check_alive(socket)
                    continue
                identity, *frames = socket.recv_multipart()
                message = decoder.decode(frames)
                if isinstance(message, Hello):
                    init = Init(config, usage, [self.input_address], [self.output_address])
                    socket.send_multipart([identity, *encoder.encode(init)])
                elif isinstance(message, ErrorReport):
                    raise message.to_error()
                else:
                    return message

    def _check_alive(self, socket: zmq.Socket[bytes]) -> None:
        if self._stopping.is_set():
            raise JubakoError("The engine was stopped while it was starting.")
        if not self._ended.is_set() or socket.poll(0):
            return
        raise JubakoError(
            f"The engine core {self._how_it_ended()} while it was starting; see its output above."
        )
