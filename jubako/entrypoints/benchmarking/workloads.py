"""Which requests does a benchmark send, and when?

Prompts are random token ids of a fixed seed, so that every engine that is measured sees the same
ones. Ends of sequences are ignored, so that every engine generates the same number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jubako.errors import ConfigError

BOS = 2
_LOWEST_ID, _HIGHEST_ID = 1000, 100_000
TRACE_BLOCK = 512
"""Prompt tokens that one hash of a trace stands for."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A request before its prompt is made.

    `arrival` is in seconds after the first. Equal leading `blocks` mean equal prompt tokens,
    `TRACE_BLOCK` each.
    """

    input_len: int
    output_len: int
    arrival: float = 0.0
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with a name. All of one shape, or as a trace has them."""

    name: str
    shapes: tuple[RequestShape, ...]
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(shape.input_len + shape.output_len for shape in self.shapes)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids below `vocab_size`, a list for each request."""
        low, high = _id_range(vocab_size)
        if all(not shape.blocks for shape in self.shapes):
            first = self.shapes[0]
            rng = random.Random(f"{self.seed}-{len(self.shapes)}-{first.input_len}")
            return [_random_prompt(rng, shape.input_len, low, high) for shape in self.shapes]
        return [self._prompt_of_blocks(shape, low, high) for shape in self.shapes]

    def _prompt_of_blocks(self, shape: RequestShape, low: int, high: int) -> list[int]:
        ids: list[int] = []
        for block in shape.blocks:
            rng = random.Random(f"{self.seed}-block-{block}")
            ids += [rng.randrange(low, high) for _ in range(TRACE_BLOCK)]
        return ids[: shape.input_len]


def _id_range(vocab_size: int) -> tuple[int, int]:
    high = min(_HIGHEST_ID, vocab_size)
    return (_LOWEST_ID if high > 2 * _LOWEST_ID else min(3, high - 1)), high


def _random_prompt(rng: random.Random, length: int, low: int, high: int) -> list[int]:
    return [min(BOS, high - 1)] + [rng.randrange(low, high) for _ in range(length - 1)]


def uniform(name: str, count: int, input_len: int, output_len: int, seed: int = 0) -> Workload:
    """`count` requests of one shape. Raises ConfigError for a number below 1."""
    for option, value in (
        ("num_prompts", count),
        ("input_len", input_len),
        ("output_len", output_len),
    ):
        if value < 1:
            raise ConfigError(f"{option}={value} must be at least 1.", option)
    return Workload(name, (RequestShape(input_len, output_len),) * count, seed)


FIXED: dict[str, tuple[int, int, int]] = {
    "decode-1": (1, 32, 128),
    "prefill-1": (1, 1024, 1),
    "batch-8": (8, 128, 128),
    "batch-32": (32, 256, 128),
    "prefill-16": (16, 1024, 1),
    "long-16k": (1, 16000, 64),
}
"""Name → requests, prompt tokens, output tokens."""


def fixed(names: str, seed: int = 0) -> list[Workload]:
    """The workloads in `names`, separated by commas; "all" for every one."""
    wanted: Sequence[str] = tuple(FIXED) if names == "all" else names.split(",")
    return list(_fixed(wanted, seed))


def _fixed(names: Sequence[str], seed: int) -> Iterator[Workload]:
    for name in names:
        if name not in FIXED:
            raise ConfigError(
                f"workload={name!r} is unknown; there is all, {', '.join(FIXED)}.", "workload"
            )
        yield uniform(name, *FIXED[name], seed=seed)
