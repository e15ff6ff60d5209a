"""How do latency and throughput change with the number of requests under way?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jubako.errors import ConfigError

_FIGURES = (
    ("ttft.png", "time to first token, ms", "ttft_ms"),
    ("tbt.png", "time between tokens, ms", "tbt_ms"),
)


def require_matplotlib() -> None:
    """Raise ConfigError where it is not installed, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'jubako[bench]'.", "plot") from None


def draw(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Time to first token, time between tokens and throughput against `max_concurrency`.

    A result without one counts as all its requests at once. Returns the files.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(results, key=_concurrency)
    xs = [_concurrency(result) for result in ordered]
    files = []

    def plot(file: str, label: str, curves: Mapping[str, Sequence[float | None]]) -> None:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="concurrent requests", ylabel=label)
        for name, ys in curves.items():
            points = [(x, y) for x, y in zip(xs, ys) if y is not None]
            axes.plot(*zip(*points), marker="o", label=name) if points else None
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
        figure.savefig(folder / file, dpi=120)
        files.append(folder / file)

    for file, label, key in _FIGURES:
        parts = [result[key] or {} for result in ordered]
        plot(file, label, {p: [part.get(p) for part in parts] for p in ("p50", "p95", "p99")})
    rates = [result["output_tokens_per_second"] for result in ordered]
    plot("throughput.png", "output tokens per second", {"output": rates})
    return files


def _concurrency(result: Mapping[str, Any]) -> int:
    return int(result.get("max_concurrency") or result["num_requests"])
