"""`jubako bench latency` and `jubako bench throughput`: an engine in this process."""

from __future__ import annotations

import argparse
from typing import Any

from jubako.entrypoints.commands.bench_options import (
    add_report_arguments,
    add_workload_arguments,
    at_least,
    reported_options,
    workloads,
)
from jubako.entrypoints.commands.engine_options import add_engine_arguments, engine_config

_DEFAULTS = {
    "latency": {"input_len": 32, "output_len": 128, "num_prompts": 8},
    "throughput": {"input_len": 256, "output_len": 128, "num_prompts": 64},
}


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Flags of the command."""
    add_workload_arguments(parser, **_DEFAULTS[kind])
    parser.add_argument(
        "--num-runs", "--num-iters", type=int, default=3, metavar="N", help="Measured runs."
    )
    parser.add_argument(
        "--num-warmups",
        "--num-iters-warmup",
        type=int,
        default=1,
        metavar="N",
        help="Runs before them that do not count.",
    )
    add_report_arguments(parser)
    add_engine_arguments(parser, quiet=True)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from jubako.entrypoints.benchmarking import report
    from jubako.entrypoints.benchmarking.offline import check_fits, measure

    at_least(args.num_runs, 1, "num_runs")
    at_least(args.num_warmups, 0, "num_warmups")
    report.check_writable(args.output, "output")
    wanted = workloads(args)
    if args.enable_prefix_caching is None:
        # Requests made at random share nothing but what earlier runs left.
        args.enable_prefix_caching = args.trace is not None
    config = engine_config(args)

    from jubako.frontend.llm_engine import LLMEngine
    from jubako.utils.logging import setup_logging

    setup_logging(config.observability_config.log_level)
    engine = LLMEngine(config)
    try:
        for workload in wanted:
            check_fits(engine, workload)
        results = [
            measure(engine, workload, num_warmups=args.num_warmups, num_runs=args.num_runs)
            for workload in wanted
        ]
        options = reported_options(args) | {"model": engine.ready.model, "dtype": _dtype(engine)}
    finally:
        engine.shutdown()
    _print(results)
    report.write_report(report.make_report(args.kind, options, results), args.output)
    return 0


def _dtype(engine: Any) -> str:
    return str(engine.config.model_config.dtype)


def _print(results: list[dict[str, Any]]) -> None:
    from jubako.entrypoints.benchmarking.report import print_rows

    titles = ["workload", "seconds", "min", "max", "output tok/s", "total tok/s"]
    titles += ["TTFT p50 ms", "TBT p50 ms", "p95", "p99"]
    rows = []
    for result in results:
        spread, between = result["spread"], result["tbt_ms"] or {}
        rows.append(
            [
                result["workload"],
                spread["seconds"]["median"],
                spread["seconds"]["min"],
                spread["seconds"]["max"],
                spread["output_tokens_per_second"]["median"],
                spread["total_tokens_per_second"]["median"],
                result["ttft_ms"]["p50"],
                between.get("p50"),
                between.get("p95"),
                between.get("p99"),
            ]
        )
    print_rows(titles, rows)
