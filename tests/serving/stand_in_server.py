"""A server process with the fake engine, for tests of signals and exit codes.

Usage: python -m tests.serving.stand_in_server MODE [drain timeout]. It writes its port on standard
output, and obeys lines on standard input: `release`, `die`.
"""

from __future__ import annotations

import sys
import threading

from jubako.config import ServerConfig
from jubako.entrypoints.server.run import HttpServer, open_listener
from jubako.errors import ModelNotFoundError
from jubako.utils.logging import setup_logging
from tests.serving.fake_engine import FakeAsyncLLM


def main() -> int:
    setup_logging("info")
    mode = sys.argv[1]
    drain_timeout = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    engine = FakeAsyncLLM()
    engine.hold()

    def start() -> FakeAsyncLLM:
        if mode == "never-starts":
            threading.Event().wait()
        if mode == "fails":
            raise ModelNotFoundError("There is no model.")
        return engine

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "release":
                engine.release()
            elif line.strip() == "die":
                engine.die()

    listener = open_listener(ServerConfig(port=0))
    config = ServerConfig(port=0, drain_timeout=drain_timeout)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=obey, daemon=True).start()
    try:
        return HttpServer(config, start, listener).run()  # type: ignore[arg-type]
    except ModelNotFoundError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
