"""Do samples fit a distribution? Each test rejects a true one once in a thousand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_Z = 3.09


def fits_counts(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's chi-square test, with Wilson and Hilferty's quantile."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    spread = 2 / (9 * freedom)
    return statistic < freedom * (1 - spread + _Z * spread**0.5) ** 3


def fits_cdf(values: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Kolmogorov's test for a continuous distribution."""
    ordered = cdf(np.sort(values))
    count = len(ordered)
    above = (np.arange(1, count + 1) / count - ordered).max()
    below = (ordered - np.arange(count) / count).max()
    return max(above, below) * count**0.5 < 1.95
