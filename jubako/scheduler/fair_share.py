"""How many tokens of a step may one prompt take while others wait?

Max-min fairness: whoever needs less than an equal part gets all it needs, and what that leaves is
divided among the rest (Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_SHARING_PREFILLS = 4
"""Prompts that divide a step. With more, all of a crowd of long prompts would end late together;
with this many, a long prompt keeps a quarter of the step and a short one behind it still starts."""


def fair_share(wants: Iterable[int], budget: int) -> int | None:
    """The most tokens that one of `wants` may take of `budget`, at least 1; None: no limit needed.

    >>> fair_share([100, 3], 16)
    13
    >>> fair_share([100, 100, 100], 16)
    6
    >>> fair_share([4, 3], 16) is None
    True
    """
    ordered = sorted(wants)
    left = budget
    for position, want in enumerate(ordered):
        part = -(-left // (len(ordered) - position))
        if want > part:
            return max(part, 1)
        left -= want
    return None
