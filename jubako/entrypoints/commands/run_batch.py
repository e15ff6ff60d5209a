"""`jubako run-batch`: answer a file of requests, in OpenAI's batch format."""

from __future__ import annotations

import argparse

from jubako.config import ServerConfig
from jubako.config.options import values_of
from jubako.entrypoints.commands.engine_options import add_engine_arguments, engine_config
from jubako.errors import ConfigError

DEFAULT_CONCURRENCY = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="Requests, one JSON a line."
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="Answers, in the order they come.",
    )
    exists = parser.add_mutually_exclusive_group()
    exists.add_argument(
        "--resume",
        action="store_true",
        help="Keep the answers that the output file holds, and answer the others.",
    )
    exists.add_argument(
        "--overwrite", action="store_true", help="Replace an output file that exists."
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"Requests in flight at the same time (default: {DEFAULT_CONCURRENCY}).",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="Replaces the model's template.")
    add_engine_arguments(parser, quiet=True)


def run(args: argparse.Namespace) -> int:
    """Answer every request; 1 if one of them failed."""
    import asyncio
    import sys

    from jubako.entrypoints.batch import BatchFiles, run_batch
    from jubako.utils.logging import setup_logging

    if args.max_concurrency < 1:
        raise ConfigError(
            f"max_concurrency={args.max_concurrency} must be at least 1.", "max_concurrency"
        )
    server = ServerConfig(**values_of(ServerConfig, {"chat_template": args.chat_template}))
    config = engine_config(args)
    setup_logging(config.observability_config.log_level)
    with BatchFiles(args.input_file, args.output_file, args.resume, args.overwrite) as files:
        from jubako.frontend.async_llm import AsyncLLM

        engine = AsyncLLM.from_config(config)
        try:
            count = asyncio.run(run_batch(engine, server, files, args.max_concurrency))
        finally:
            engine.shutdown()
    kept = f", {count.kept} kept from before" if count.kept else ""
    print(f"{count.answered} answered, {count.failed} failed{kept}.", file=sys.stderr)
    return 1 if count.failed else 0
