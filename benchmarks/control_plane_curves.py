"""How does a decode step grow with running requests, with the pool, and with the context?

It should grow with the requests, hardly with the pool, and not at all with the context.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from control_plane_workloads import BLOCK, Workload, measure_point

Points = list[dict[str, Any]]

RUNNING = [2**power for power in range(14)]
POOLS = [1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
CONTEXTS = [2**power for power in range(7, 16)]
GROUPS = (1, 6)
STEPS = 4 * BLOCK


def by_running(clock: str, values: list[int] = RUNNING) -> Points:
    """Requests of 64 tokens in a pool with room for all of them."""
    return [
        measure_point(
            Workload(
                running=running,
                groups=groups,
                prompt=64,
                shared=32,
                blocks=running * groups * 12 + 1000,
                budget=max(8192, running * 64),
                steps=STEPS,
                clock=clock,
            ),
            repeats=1 + 64 // running,
        )
        for groups, running in product(GROUPS, values)
    ]


def by_pool(clock: str, values: list[int] = POOLS) -> Points:
    """16 requests of 64 tokens in a pool whose every block holds somebody's cached KV."""
    return [
        measure_point(
            Workload(
                running=16,
                groups=groups,
                prompt=64,
                shared=32,
                blocks=blocks,
                steps=STEPS,
                clock=clock,
            ),
            full_cache=True,
            repeats=4,
        )
        for groups, blocks in product(GROUPS, values)
    ]


def by_context(clock: str, values: list[int] = CONTEXTS) -> Points:
    """16 requests with prompts of which nothing, or half, is shared."""
    return [
        measure_point(
            Workload(
                running=16,
                groups=groups,
                prompt=context,
                shared=int(context * share),
                blocks=(2 * context + 2000) * groups,
                max_model_len=2 * context + 1024,
                steps=STEPS,
                clock=clock,
            ),
            repeats=2,
        )
        for share, groups, context in product((0, 0.5), GROUPS, values)
    ]


CURVES: dict[str, tuple[str, Callable[[str], Points]]] = {
    "running": ("running requests", by_running),
    "blocks": ("blocks in the pool", by_pool),
    "prompt": ("prompt tokens", by_context),
}
"""By the field of a point that varies: how it is called, and what measures it."""


def measure_curves(clock: str, tell: Callable[[str], None] = print) -> dict[str, Points]:
    """All curves; a line for each point goes to `tell`."""
    curves = {}
    for field, (name, points_of) in CURVES.items():
        curves[field] = points_of(clock)
        tell(
            f"\n{'groups':>8} {name:>20} {'shared':>8} {'median us/step':>15} {'mean us/step':>14}"
        )
        for point in curves[field]:
            tell(
                f"{point['groups']:8} {point[field]:20,} {point['shared']:8,} "
                f"{point['median_ms'] * 1e3:15,.1f} {point['mean_ms'] * 1e3:14,.1f}"
            )
    return curves


def draw(curves: dict[str, Points], folder: Path) -> list[Path]:
    """An SVG for each curve. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    # The same points give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "control_plane"
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for field, points in curves.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        lines: dict[str, Points] = {}
        for point in points:
            label = "1 KV group" if point["groups"] == 1 else f"{point['groups']} KV groups"
            if field == "prompt":
                label += ", half shared" if point["shared"] else ", nothing shared"
            lines.setdefault(label, []).append(point)
        for label, line in lines.items():
            at = [point[field] for point in line]
            (mean,) = axes.plot(at, [p["mean_ms"] * 1e3 for p in line], "o-", label=label)
            medians = [p["median_ms"] * 1e3 for p in line]
            axes.plot(at, medians, ":", color=mean.get_color())
        axes.set(xscale="log", xlabel=CURVES[field][0], ylabel="schedule + update, us a step")
        axes.set_yscale("log") if field == "running" else axes.set_ylim(bottom=0)
        axes.set_title("Decode step: mean (solid) and median (dotted)")
        axes.grid(alpha=0.3)
        axes.legend()
        paths.append(folder / f"control_plane_{field}.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths
