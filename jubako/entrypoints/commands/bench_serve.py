"""`jubako bench serve`: any server with OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from jubako.entrypoints.benchmarking.serving import COMPLETIONS, ENDPOINTS
from jubako.entrypoints.commands.bench_options import (
    add_report_arguments,
    add_workload_arguments,
    at_least,
    reported_options,
    workloads,
)
from jubako.errors import ConfigError

API_KEY_VARIABLE = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Flags of the command."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--model", help="As the server names it (default: its first model).")
    parser.add_argument("--endpoint", choices=ENDPOINTS, default=COMPLETIONS)
    add_workload_arguments(parser, input_len=256, output_len=128, num_prompts=64)
    parser.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="Requests a second, with random gaps (Poisson). Default: inf, when the trace says so, "
        "else all at once.",
    )
    parser.add_argument(
        "--max-concurrency",
        default=None,
        metavar="N[,N...]",
        help="Requests open at the same time; several numbers are measured one after another.",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--vocab-size", type=int, default=32000, metavar="N", help="Token ids are below it."
    )
    parser.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="Leave out ignore_eos, which a server may not know.",
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--plot", metavar="DIR", help="Draw the figures against concurrency.")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    from jubako.entrypoints.benchmarking import plots, report, serving

    levels = _levels(args.max_concurrency)
    at_least(args.vocab_size, 8, "vocab_size")
    if not args.timeout > 0:
        raise ConfigError(f"timeout={args.timeout} must be above 0.", "timeout")
    report.check_writable(args.output, "output")
    wanted = workloads(args)
    moments = [serving.send_times(w, args.request_rate, args.seed) for w in wanted]
    _require_httpx()
    if args.plot is not None:
        plots.require_matplotlib()
    key = os.environ.get(API_KEY_VARIABLE)
    model = args.model or _first_model(args.base_url, key, args.timeout)
    target = serving.Target(args.base_url, model, args.endpoint, key, args.timeout, args.ignore_eos)
    results: list[dict[str, Any]] = []
    for workload, times in zip(wanted, moments):
        for level in levels:
            figures = asyncio.run(
                serving.run(
                    target,
                    workload,
                    moments=times,
                    max_concurrency=level,
                    vocab_size=args.vocab_size,
                )
            )
            about = {"workload": workload.name, "num_requests": len(workload.shapes)}
            results.append(about | {"max_concurrency": level} | figures)
    _print(results)
    options = reported_options(args) | {"model": model}
    # JSON has no infinity.
    options["request_rate"] = str(args.request_rate)
    report.write_report(report.make_report("serve", options, results), args.output)
    if args.plot is not None:
        for path in plots.draw(results, Path(args.plot)):
            print(path)
    return 1 if any(result["failed"] for result in results) else 0


def _levels(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"max_concurrency={text!r} must be numbers separated by commas.", "max_concurrency"
        ) from None
    return [at_least(number, 1, "max_concurrency") for number in numbers]


def _require_httpx() -> None:
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ConfigError(
            "bench serve needs httpx: pip install 'jubako[bench]'.", "base_url"
        ) from None


def _first_model(base_url: str, key: str | None, timeout: float) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=timeout)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"base_url={base_url!r} does not name its models ({type(error).__name__}: {error}); "
            "is the server running? Or give --model.",
            "base_url",
        ) from None


def _print(results: list[dict[str, Any]]) -> None:
    from jubako.entrypoints.benchmarking.report import print_rows

    titles = ["workload", "concurrency", "ok", "failed", "seconds", "output tok/s"]
    titles += ["TTFT p50 ms", "p95", "p99", "TBT p50 ms", "p95", "p99", "client CPU s"]
    rows = []
    for r in results:
        row = [r["workload"], r["max_concurrency"] or "open", r["completed"], r["failed"]]
        row += [r["seconds"], r["output_tokens_per_second"]]
        for name in ("ttft_ms", "tbt_ms"):
            row += [(r[name] or {}).get(p) for p in ("p50", "p95", "p99")]
        rows.append([*row, r["client_cpu_seconds"]])
    print_rows(titles, rows)
    for result in results:
        for reason, count in result["errors"].items():
            print(f"{count} failed: {reason}")
