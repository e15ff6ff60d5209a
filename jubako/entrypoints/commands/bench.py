"""`jubako bench`: measure latency, throughput, a server, or the start."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

_KINDS = {
    "latency": ("offline", "how long a batch of requests takes, in this process"),
    "throughput": ("offline", "how many tokens a second many requests get, in this process"),
    "serve": ("serve", "a server with OpenAI's HTTP interface, Jubako's or another"),
    "startup": ("startup", "process start to first token of `jubako generate`"),
}
"""Kind → the module `bench_...` that does it, and its summary."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of all kinds."""
    kinds = parser.add_subparsers(
        dest="kind", metavar="KIND", required=True, parser_class=type(parser)
    )
    for name, (_, summary) in _KINDS.items():
        kinds.add_parser(name, help=summary, description=f"Measure {summary}.", fill=_filler(name))


def run(args: argparse.Namespace) -> int:
    """Run the kind that was asked for."""
    code: int = args.run_kind(args)
    return code


def _filler(name: str) -> Callable[[argparse.ArgumentParser], None]:
    def fill(parser: argparse.ArgumentParser) -> None:
        module = import_module(f"jubako.entrypoints.commands.bench_{_KINDS[name][0]}")
        module.add_arguments(parser, name)
        parser.set_defaults(run_kind=module.run)

    return fill
