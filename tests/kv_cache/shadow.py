"""What the KV memory would really hold, had the steps run.

The content of a token's KV is a number that stands for all tokens up to it, so that a request can
tell at once whether a block that it reads holds what it would have computed itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jubako.kv_cache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


def contents(tokens: Sequence[int], salt: str | None) -> list[int]:
    """`contents[p]` stands for the first p tokens."""
    chain = [hash(salt)]
    for token in tokens:
        chain.append(hash((chain[-1], token)))
    return chain


def first_read(spec: KVCacheSpec, position: int) -> int:
    """The first token that the token at `position` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size * spec.attention_chunk_size
    assert isinstance(spec, FullAttentionSpec)
    return 0


@dataclass
class Part:
    """One request in one step: tokens `start` to `stop`, those before `computed` found or loaded.

    The tables are as they were when the step was planned.
    """

    start: int
    computed: int
    stop: int
    content: list[int]
    tables: list[list[int]]
    loaded: list[set[int]]
    """For each group the ids that the connector fills."""


def _drafts(spec: MambaSpec) -> bool:
    """States of drafted tokens lie where the worker puts them, which is not played here."""
    return spec.num_speculative_blocks > 0


class ShadowMemory:
    """Encoder outputs of cross attention are not played."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.groups = [
            (group, spec)
            for group, spec in enumerate(specs)
            if not isinstance(spec, CrossAttentionSpec)
        ]
        self.tokens: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}

    def load(self, part: Part) -> None:
        """What the connector brings."""
        for group, spec in self.groups:
            size = spec.block_size
            for index, block_id in enumerate(part.tables[group]):
                if block_id in part.loaded[group]:
                    if isinstance(spec, MambaSpec):
                        self.states[block_id] = part.content[part.computed]
                        continue
                    for p in range(index * size, min((index + 1) * size, part.computed)):
                        self.tokens[block_id, p % size] = part.content[p + 1]

    def run(self, parts: Sequence[Part]) -> None:
        """One step. All states are read before, and all KV written before it is read."""
        for part in parts:
            self.load(part)
        for part in parts:
            for group, spec in self.groups:
                if isinstance(spec, MambaSpec) and part.computed and not _drafts(spec):
                    block_id = part.tables[group][(part.computed - 1) // spec.block_size]
                    assert self.states.get(block_id) == part.content[part.computed], (
                        f"group {group}: block {block_id} is not the state after {part.computed}"
                    )
        for part in parts:
            self._write(part)
        for part in parts:
            self._read(part)

    def _write(self, part: Part) -> None:
        for group, spec in self.groups:
            size, row = spec.block_size, part.tables[group]
            if isinstance(spec, MambaSpec):
                if _drafts(spec):
                    continue
                if spec.mamba_cache_mode == "all":
                    for end in range((part.computed // size + 1) * size, part.stop, size):
                        self.states[row[end // size - 1]] = part.content[end]
                if part.stop > part.computed:
                    assert row[(part.stop - 1) // size], f"group {group}: no block for the state"
                    self.states[row[(part.stop - 1) // size]] = part.content[part.stop]
                continue
            for p in range(part.computed, part.stop):
                assert row[p // size], f"group {group}: token {p} has no block"
                self.tokens[row[p // size], p % size] = part.content[p + 1]

    def _read(self, part: Part) -> None:
        for group, spec in self.groups:
            if isinstance(spec, MambaSpec) or part.stop == part.computed:
                continue
            size, row = spec.block_size, part.tables[group]
            # The step's first token looks back furthest, its last sees all the rest.
            for p in range(first_read(spec, part.computed), part.stop):
                if p < first_read(spec, part.stop - 1) and p >= part.computed:
                    continue
                block_id = row[p // size]
                held = self.tokens.get((block_id, p % size)) if block_id else None
                assert held == part.content[p + 1], (
                    f"group {group}: block {block_id} does not hold token {p}"
                )
