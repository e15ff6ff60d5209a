"""Where along a prefix is the last state of a recurrent layer?

States are kept where steps ended, so a long prefix may have very few of them. Walking it backwards
asks for every block. Here each state also leaves a mark on the zones of 16, 256, 4,096 and 65,536
blocks that it lies in, and a zone without a mark is passed over as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jubako.kv_cache.blocks import BlockHash

_BITS = 4
_LEVELS = 4

Zone = tuple[int, BlockHash]
"""Its level, and the hash of the prefix before it: zones of other prefixes are others."""


class StateIndex:
    """The states of one group, by block id."""

    def __init__(self) -> None:
        self._marks: dict[Zone, int] = {}
        self._zones_of: dict[int, list[Zone]] = {}

    def __len__(self) -> int:
        return len(self._zones_of)

    def add(self, block_id: int, block_hashes: Sequence[BlockHash], scale: int, index: int) -> None:
        """The block holds the state behind block `index` of a prefix.

        A block is `scale` times as large as those of `block_hashes`.
        """
        zones = [_zone(block_hashes, scale, level, index) for level in range(1, _LEVELS + 1)]
        for zone in zones:
            self._marks[zone] = self._marks.get(zone, 0) + 1
        self._zones_of[block_id] = zones

    def discard(self, block_id: int) -> None:
        """The block holds no state any more."""
        for zone in self._zones_of.pop(block_id, ()):
            self._marks[zone] -= 1
            if not self._marks[zone]:
                del self._marks[zone]

    def clear(self) -> None:
        """No block holds a state any more."""
        self._marks.clear()
        self._zones_of.clear()

    def last(
        self, block_hashes: Sequence[BlockHash], stop: int, is_state: Callable[[int], bool]
    ) -> int:
        """The greatest index below `stop` for which `is_state`, -1 if there is none.

        `block_hashes` are those of the group's own block size. Exact: a mark only says that a zone
        may hold a state of this prefix.
        """
        return self._search(block_hashes, _LEVELS, 0, stop, is_state)

    def _search(
        self,
        block_hashes: Sequence[BlockHash],
        level: int,
        start: int,
        stop: int,
        is_state: Callable[[int], bool],
    ) -> int:
        if level == 0:
            return next((i for i in range(stop - 1, start - 1, -1) if is_state(i)), -1)
        width = 1 << _BITS * level
        for first in range((stop - 1) // width * width, start - 1, -width):
            if _zone(block_hashes, 1, level, first) in self._marks:
                end = min(stop, first + width)
                found = self._search(block_hashes, level - 1, first, end, is_state)
                if found >= 0:
                    return found
        return -1


def _zone(block_hashes: Sequence[BlockHash], scale: int, level: int, index: int) -> Zone:
    first = index >> _BITS * level << _BITS * level
    return level, block_hashes[first * scale - 1] if first else BlockHash(b"")
