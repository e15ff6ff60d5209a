"""The last state of a prefix: the index against a walk."""

from __future__ import annotations

from random import Random

from jubako.kv_cache.state_index import StateIndex

from .fakes import NIGHTLY


def chain(*parts: tuple[int, int]) -> list[bytes]:
    """Hashes of a prefix: `(branch, length)` after `(branch, length)`."""
    hashes, name = [], b""
    for branch, length in parts:
        name += bytes([branch])
        start = len(hashes)
        hashes += [name + i.to_bytes(4, "big") for i in range(start, start + length)]
    return hashes


def test_equals_a_walk():
    for seed in range(200 if NIGHTLY else 20):
        rng = Random(seed)
        prefixes = [
            chain((0, 700), (branch, 700), (branch + leaf, 300))
            for branch in (1, 2)
            for leaf in (0, 5)
        ]
        index, states = StateIndex(), {}
        for block_id in range(300):
            prefix, position = rng.choice(prefixes), rng.choice([3, 15, 16, 255, 256, 699, 1500])
            position = min(position + rng.randint(0, 20), len(prefix) - 1)
            if prefix[position] not in states.values():
                states[block_id] = prefix[position]
                index.add(block_id, prefix, 1, position)
            if states and rng.random() < 0.6:
                gone = rng.choice(list(states))
                del states[gone]
                index.discard(gone)
            prefix, stop = rng.choice(prefixes), rng.randint(0, 1700)
            known = set(states.values())
            walk = max((i for i in range(stop) if prefix[i] in known), default=-1)
            assert index.last(prefix, stop, lambda i, p=prefix, k=known: p[i] in k) == walk
        for block_id in states:
            index.discard(block_id)
        assert len(index) == 0
        assert index._marks == {}


def test_unknown_blocks_are_ignored():
    index = StateIndex()
    index.discard(7)
    assert index.last([], 0, lambda i: True) == -1


def test_few_questions():
    index, prefix = StateIndex(), chain((0, 100_000))
    index.add(1, prefix, 1, 12)
    asked = []
    assert index.last(prefix, 100_000, lambda i: asked.append(i) or i == 12) == 12
    assert asked == [15, 14, 13, 12]


def test_larger_blocks():
    """The hashes given may be of parts of a block."""
    small = chain((0, 400))
    index = StateIndex()
    index.add(1, small, 4, 70)
    large = small[3::4]
    assert index.last(large, 100, lambda i: i == 70) == 70
