"""What do the core's process and its launcher say to each other at start-up?

core → launcher   `Hello`        the process runs
launcher → core   `Init`         what to build, and where to listen
core → launcher   `Ready`        what was built, or
                  `ErrorReport`  why not
"""

from __future__ import annotations

from typing import Literal

import msgspec

from jubako.config import JubakoConfig
from jubako.engine.error_report import ErrorReport
from jubako.engine.messages import EngineCoreReady

Usage = Literal["llm", "server"]
"""For which kind of use the defaults of the scheduler are chosen."""


class Hello(msgspec.Struct, tag=True):
    """The core's process runs and waits for `Init`."""

    pid: int


class Init(msgspec.Struct, tag=True):
    """What the core is to build. Addresses are ZMQ endpoints, one per front end."""

    config: JubakoConfig
    usage: Usage
    input_addresses: list[str]
    output_addresses: list[str]


class Ready(msgspec.Struct, tag=True):
    """The core is built; `config` is complete."""

    ready: EngineCoreReady
    config: JubakoConfig


FromCore = Hello | Ready | ErrorReport
