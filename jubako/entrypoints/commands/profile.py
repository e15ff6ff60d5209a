"""`jubako profile`: run a workload, print where its steps' time goes, and write a trace."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jubako.entrypoints.commands.bench_options import (
    add_report_arguments,
    add_workload_arguments,
    at_least,
    workloads,
)
from jubako.entrypoints.commands.engine_options import add_engine_arguments, engine_config
from jubako.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add_workload_arguments(parser, input_len=32, output_len=128, num_prompts=1)
    parser.add_argument(
        "--trace-output",
        metavar="FILE",
        help="Write a trace for https://ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="Runs that are not recorded."
    )
    add_report_arguments(parser)
    add_engine_arguments(parser, quiet=True)


def run(args: argparse.Namespace) -> int:
    """Profile and print."""
    from jubako.entrypoints.benchmarking import report

    at_least(args.num_warmups, 0, "num_warmups")
    for name in ("output", "trace_output"):
        report.check_writable(getattr(args, name), name)
    wanted = workloads(args)
    if len(wanted) != 1:
        raise ConfigError(
            f"workload={args.workload} names {len(wanted)} workloads; profile one at a time.",
            "workload",
        )
    if args.enable_prefix_caching is None:
        args.enable_prefix_caching = args.trace is not None
    if args.async_scheduling:
        raise ConfigError(
            "async_scheduling=True lets steps overlap, which cannot be told apart; leave it out.",
            "async_scheduling",
        )
    config = engine_config(args)

    from jubako.entrypoints.benchmarking.offline import check_fits, run_once
    from jubako.entrypoints.profiling.attach import attach, instrument_kernels, release_kernels
    from jubako.entrypoints.profiling.recorder import STEP, Recorder, totals, write_trace
    from jubako.frontend.llm_engine import LLMEngine
    from jubako.kernels.registry import set_kernels
    from jubako.utils.logging import setup_logging

    setup_logging(config.observability_config.log_level)
    recorder = Recorder()
    (workload,) = wanted
    set_kernels(config.device_config.kernels)
    instrument_kernels(recorder)
    try:
        engine = LLMEngine(config)
        try:
            check_fits(engine, workload)
            prompts = workload.prompts(engine.ready.vocab_size)
            for _ in range(args.num_warmups):
                engine.reset_prefix_cache()
                run_once(engine, workload, prompts)
            attach(recorder, engine)
            recorder.wrap(engine, "step", STEP)
            engine.reset_prefix_cache()
            recorder.spans.clear()
            _, seconds = run_once(engine, workload, prompts)
        finally:
            engine.shutdown()
    finally:
        release_kernels()
    spans = recorder.spans
    steps = sum(span.name == STEP for span in spans)
    parts = totals(spans)
    _print(parts, steps, seconds)
    if args.trace_output is not None:
        write_trace(spans, Path(args.trace_output))
    result = {"workload": workload.name, "seconds": seconds, "steps": steps, "parts": parts}
    options = {"model": args.model, "workload": workload.name}
    report.write_report(report.make_report("profile", options, [result]), args.output)
    return 0


def _print(parts: list[dict[str, Any]], steps: int, seconds: float) -> None:
    from jubako.entrypoints.benchmarking.report import print_rows

    in_steps = sum(part["seconds"] for part in parts)
    print(f"{steps} steps in {seconds:.3f} s, {1e3 * in_steps / steps:.3f} ms each on average")
    rows = [
        [p["part"], p["calls"], 1e3 * p["seconds"] / steps, f"{100 * p['share']:.1f} %"]
        for p in parts
    ]
    print_rows(["part", "calls", "ms a step", "share"], rows)
