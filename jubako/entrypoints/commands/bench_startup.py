"""`jubako bench startup`: process start to first token of `jubako generate`."""

from __future__ import annotations

import argparse

from jubako.entrypoints.commands.bench_options import add_report_arguments, at_least


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Flags of the command."""
    parser.add_argument("--model", help="A folder or file (default: the default model).")
    parser.add_argument("--num-runs", "--num-iters", type=int, default=5, metavar="N")
    parser.add_argument(
        "--cold",
        action="store_true",
        help="Also measure after the system was asked to forget the files that are read.",
    )
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from jubako.entrypoints.benchmarking import report, startup

    at_least(args.num_runs, 1, "num_runs")
    report.check_writable(args.output, "output")
    command = ["The capital of France is", "--max-tokens", "4", "--temperature", "0"]
    if args.model is not None:
        command += ["--model", args.model]
    results = startup.measure(command, num_runs=args.num_runs, cold=args.cold)
    for result in results:
        print(f"file cache {result['file_cache']}, seconds from the start of the process:")
        rows = [[phase, s["median"], s["min"], s["max"]] for phase, s in result["seconds"].items()]
        report.print_rows(["phase", "median", "min", "max"], rows)
    options = {"model": args.model, "num_runs": args.num_runs}
    report.write_report(report.make_report("startup", options, results), args.output)
    return 0
