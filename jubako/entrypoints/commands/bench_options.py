"""Which flags do benchmarks share, and which workloads do they ask for?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jubako.entrypoints.benchmarking.workloads import FIXED, Workload, fixed, uniform
from jubako.errors import ConfigError


def add_workload_arguments(
    parser: argparse.ArgumentParser, *, input_len: int, output_len: int, num_prompts: int
) -> None:
    """Flags that choose requests; the numbers are what random ones have by default."""
    parser.add_argument(
        "--workload",
        metavar="NAMES",
        help=f"Fixed workloads, separated by commas: all, {', '.join(FIXED)}.",
    )
    parser.add_argument(
        "--trace",
        "--dataset-path",
        metavar="FILE",
        help="Requests of a trace: JSON lines as Mooncake's, or CSV as Azure's.",
    )
    parser.add_argument(
        "--input-len",
        "--random-input-len",
        type=int,
        metavar="N",
        help=f"Prompt tokens of random requests (default: {input_len}).",
    )
    parser.add_argument(
        "--output-len",
        "--random-output-len",
        type=int,
        metavar="N",
        help=f"Tokens to generate for each (default: {output_len}).",
    )
    parser.add_argument(
        "--num-prompts",
        "--batch-size",
        type=int,
        metavar="N",
        help=f"Random requests, or the first of a trace (default: {num_prompts}).",
    )
    parser.set_defaults(random_defaults=(input_len, output_len, num_prompts))


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the report goes."""
    parser.add_argument(
        "--output", "--output-json", metavar="FILE", help="Write the report as JSON."
    )


def reported_options(args: argparse.Namespace) -> dict[str, Any]:
    """What a report says of the flags, without what the parser keeps beside them."""
    hidden = ("run", "run_kind", "random_defaults")
    return {name: value for name, value in vars(args).items() if name not in hidden}


def workloads(args: argparse.Namespace) -> list[Workload]:
    """The workloads that the flags ask for. ConfigError if they contradict each other."""
    sizes = (args.input_len, args.output_len, args.num_prompts)
    if args.workload is not None:
        if args.trace is not None or sizes != (None, None, None):
            raise ConfigError(
                f"workload={args.workload} has its own requests; leave out --trace, --input-len, "
                "--output-len and --num-prompts.",
                "workload",
            )
        return fixed(args.workload, args.seed)
    input_len, output_len, count = (
        default if value is None else value for value, default in zip(sizes, args.random_defaults)
    )
    if args.trace is not None:
        if args.input_len is not None or args.output_len is not None:
            raise ConfigError(
                f"trace={args.trace} says how long requests are; leave out --input-len and "
                "--output-len.",
                "trace",
            )
        from jubako.entrypoints.benchmarking.traces import read_trace

        return [read_trace(Path(args.trace), count, args.seed)]
    return [uniform("random", count, input_len, output_len, args.seed)]


def at_least(value: int, least: int, option: str) -> int:
    """`value`, or a ConfigError."""
    if value < least:
        raise ConfigError(f"{option}={value} must be at least {least}.", option)
    return value
