"""Where must a chunk of a prompt end, so that recurrent layers keep a state others can go on from?

A recurrent layer that aligns its states writes one where a chunk ends, and the state can be found
again only if that is a block border. So chunks end at borders, and one of them at the last border
that other prompts share with this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from jubako.kv_cache import KVCacheSpec, MambaSpec
from jubako.scheduler.request import Request


class ChunkEnds:
    """Rounds chunks to borders of `block_size` tokens; 1: anywhere will do."""

    def __init__(self, specs: Iterable[KVCacheSpec]) -> None:
        self.block_size = lcm(
            *(
                spec.block_size
                for spec in specs
                if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"
            )
        )

    def round(
        self, request: Request, computed: int, count: int, *, possible: int, reachable: int
    ) -> int:
        """The part of a chunk of `count` tokens behind `computed` that should be computed now.

        `possible` tokens are the most that budget and media allow in this step: a chunk that was
        cut for others may grow to the next border within it. `reachable` are the most that any step
        can give the request; if they are less than a block, the chunk stays as it is. 0: the border
        is for a later step.
        """
        size = self.block_size
        end = computed + count
        if size == 1 or count <= 0 or computed >= request.num_tokens - 1 or reachable < size:
            return count
        shared = request.shared_prefix_tokens // size * size
        if computed < shared < end:
            end = shared
        last_border = request.num_tokens // size * size
        if end > last_border:
            # What follows the last border needs none, but the border itself wants a state.
            return last_border - computed if computed < last_border else count
        border = end // size * size
        if border > computed:
            return border - computed
        to_next = (computed // size + 1) * size - computed
        if to_next <= possible:
            return to_next
        return 0
