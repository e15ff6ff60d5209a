"""How do PyTorch's threads wait for work without keeping other processes from theirs?

Between two parallel loops libgomp's threads spin, by default for some 10 ms. On a machine whose
cores also run the front end, or anything else, they then spend whole time slices on nothing, and a
step may take many times as long. A short spin covers the gaps inside a step; a longer wait sleeps.
`OMP_WAIT_POLICY=active` is the better choice for a machine that does nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

SPIN_COUNT = 2000
"""Iterations, 30 to 100 microseconds."""


def set_wait_policy(environment: MutableMapping[str, str]) -> None:
    """Make threads of processes with this environment spin briefly, unless it says how to wait.

    Counts for the present process only before PyTorch is loaded.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def set_own_wait_policy() -> None:
    """The same for this process, if it is not too late."""
    if "torch" not in sys.modules:
        set_wait_policy(os.environ)
