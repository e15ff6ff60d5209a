"""Which figures come out of the times at which tokens came?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class RequestTimes:
    """What happened to one request, in seconds of one clock.

    `arrivals` has a time for each delivery: a token, or the few that came together.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of a hundred lie, interpolated between neighbours.

    NaN without values.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None without values."""
    if not values:
        return None
    named = {f"p{p}": percentile(values, p) for p in PERCENTILES}
    return {"mean": statistics.fmean(values)} | named


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest of the runs, and the runs themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": list(values),
    }


def summarise(requests: Sequence[RequestTimes], seconds: float) -> dict[str, Any]:
    """Figures of one run that took `seconds`. Failed requests only count as failed.

    Times are in milliseconds: `ttft_ms` from sending to the first delivery, `tbt_ms` between
    deliveries, `tpot_ms` a token after the first, `e2e_ms` from sending to the last.
    """
    good = []
    errors: dict[str, int] = {}
    for request in requests:
        if request.error is None and request.arrivals:
            good.append(request)
        else:
            reason = request.error or "no output"
            errors[reason] = errors.get(reason, 0) + 1
    gaps = [1e3 * (b - a) for r in good for a, b in zip(r.arrivals, r.arrivals[1:])]
    inputs = sum(r.input_tokens for r in good)
    outputs = sum(r.output_tokens for r in good)
    return {
        "seconds": seconds,
        "completed": len(good),
        "failed": len(requests) - len(good),
        "errors": errors,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": outputs / seconds,
        "total_tokens_per_second": (inputs + outputs) / seconds,
        "ttft_ms": distribution([1e3 * (r.arrivals[0] - r.sent) for r in good]),
        "tbt_ms": distribution(gaps),
        "tpot_ms": distribution(
            [
                1e3 * (r.arrivals[-1] - r.arrivals[0]) / (r.output_tokens - 1)
                for r in good
                if r.output_tokens > 1
            ]
        ),
        "e2e_ms": distribution([1e3 * (r.arrivals[-1] - r.sent) for r in good]),
    }
