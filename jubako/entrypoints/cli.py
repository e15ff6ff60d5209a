"""What does `jubako` on the command line do?

Commands are in `commands/`, one file each; the flags of a command are made, and what it needs is
imported, only when it is the one that runs.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from jubako import __version__
from jubako.errors import ConfigError, JubakoError, ValidationError

EXIT_FAILURE = 1
EXIT_BAD_OPTION = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DEBUG_VARIABLE = "JUBAKO_LOG_LEVEL"

COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("complete",),
    "chat": (),
    "serve": (),
    "run-batch": (),
    "bench": (),
    "profile": (),
    "doctor": ("collect-env",),
}
"""Command → its other names. Each is a module of `jubako.entrypoints.commands`."""

_SUMMARIES = {
    "generate": "continue a text",
    "chat": "talk to the model",
    "serve": "answer OpenAI's HTTP interface",
    "run-batch": "answer a file of requests, in OpenAI's batch format",
    "bench": "measure latency, throughput, a server, or the start",
    "profile": "show where the time of a step goes",
    "doctor": "show what this machine has and what Jubako would use",
}


class Parser(argparse.ArgumentParser):
    """A parser that says errors in one line, and gets its arguments when it first parses."""

    def __init__(
        self, *, fill: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any
    ) -> None:
        super().__init__(**{"allow_abbrev": False} | options)
        self._fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, after adding the arguments."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
            _take_config_file(self, args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end."""
        self.exit(EXIT_BAD_OPTION, f"jubako: error: {message} (try: {self.prog} --help)\n")


def _take_config_file(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Make what the file of `--config` says the defaults of `parser`."""
    if "--config" not in parser._option_string_actions:
        return
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    try:
        path = finder.parse_known_args(args)[0].config
    except argparse.ArgumentError:
        # Without a value; the parser itself says so.
        return
    if path is None:
        return
    from jubako.config import ENGINE_CONCERNS, ServerConfig
    from jubako.config.file import file_values

    options = {action.dest for action in parser._actions}
    # A file may serve several commands: what this one does not have, it need not know.
    values = file_values(path, (*ENGINE_CONCERNS, ServerConfig))
    parser.set_defaults(**{name: value for name, value in values.items() if name in options})


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="jubako",
        description="LLM inference and serving, built around the KV cache.",
        epilog="jubako COMMAND --help shows the options of a command. Options of the "
        "engine and the server can also be set by environment variables: --max-model-len by "
        "JUBAKO_MAX_MODEL_LEN.",
    )
    parser.add_argument("--version", action="version", version=f"jubako {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, aliases in COMMANDS.items():
        commands.add_parser(
            name,
            aliases=aliases,
            help=_SUMMARIES[name],
            description=_SUMMARIES[name][0].upper() + _SUMMARIES[name][1:] + ".",
            fill=_filler(name),
        )
    return parser


def _filler(name: str) -> Callable[[argparse.ArgumentParser], None]:
    def fill(parser: argparse.ArgumentParser) -> None:
        module = import_module(f"jubako.entrypoints.commands.{name.replace('-', '_')}")
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)

    return fill


def _open_standard_streams() -> None:
    """Make empty streams of those that are closed.

    Otherwise the next file or socket gets their number, and then what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for a failure, 2 for a bad option."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Half an answer is worse than one with a character escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = os.environ.get(DEBUG_VARIABLE, "").lower() == "debug"
    try:
        args = build_parser().parse_args(argv)
        debug = debug or getattr(args, "log_level", None) == "debug"
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if debug:
            raise
        return _report(error)


def _report(error: Exception) -> int:
    if isinstance(error, JubakoError):
        print(f"jubako: error: {error.message}", file=sys.stderr)
        bad_option = isinstance(error, ConfigError | ValidationError)
        return EXIT_BAD_OPTION if bad_option else EXIT_FAILURE
    print(
        f"jubako: error: {type(error).__name__}: {error} (set {DEBUG_VARIABLE}=debug to see where)",
        file=sys.stderr,
    )
    return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
