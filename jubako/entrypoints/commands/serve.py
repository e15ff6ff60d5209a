"""`jubako serve`: the HTTP server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jubako.config import ServerConfig
from jubako.config.options import add_arguments as add_option_arguments
from jubako.config.options import values_of
from jubako.entrypoints.commands.engine_options import add_engine_arguments, engine_config

if TYPE_CHECKING:
    from jubako.frontend.async_llm import AsyncLLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help="The model; the same as --model."
    )
    add_option_arguments(parser, (ServerConfig,))
    add_engine_arguments(parser, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes or the engine dies."""
    if args.model_argument is not None:
        args.model = args.model_argument
    server_config = ServerConfig(**values_of(ServerConfig, vars(args)))
    config = engine_config(args)

    from jubako.utils.logging import setup_logging

    setup_logging(config.observability_config.log_level)
    from jubako.entrypoints.server.run import HttpServer, open_listener

    listener = open_listener(server_config)

    def start_engine() -> AsyncLLM:
        from jubako.frontend.async_llm import AsyncLLM

        return AsyncLLM.from_config(config)

    return HttpServer(server_config, start_engine, listener).run()
