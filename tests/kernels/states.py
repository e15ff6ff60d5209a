"""How do the tests lay out the states of a step's requests?

A step mixes requests of many lengths, new and old; states lie scattered in pages, with NaN wherever
nothing may be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from jubako.kernels.state_slots import StateSlots

NUM_BLOCKS = 40


@dataclass
class Step:
    """Requests of these lengths; `kept` has positions inside each after which a state is kept."""

    lengths: list[int]
    old: list[bool]
    kept: list[list[int]]


STEPS = {
    "one token each": Step([1, 1, 1], [True, False, True], [[], [], []]),
    "long and short": Step([150, 1, 64, 3, 65], [True, True, False, False, True], [[]] * 5),
    "borders": Step(
        [150, 1, 40, 7], [True, False, False, True], [[9, 73, 137, 148], [], [0, 31], [2, 5]]
    ),
    "a new token": Step([1], [False], [[]]),
}


def make_slots(step: Step, rng: np.random.Generator) -> StateSlots:
    starts = np.concatenate([[0], np.cumsum(step.lengths)]).astype(np.int64)
    blocks = iter(rng.permutation(NUM_BLOCKS).tolist())
    read = [next(blocks) if old else -1 for old in step.old]
    requests, tokens = [], []
    for i, length in enumerate(step.lengths):
        for position in [*step.kept[i], length - 1]:
            requests.append(i)
            tokens.append(int(starts[i]) + position)
    write = [next(blocks) for _ in requests]
    return StateSlots(
        starts, np.asarray(read), np.asarray(requests), np.asarray(tokens), np.asarray(write)
    )


def paged(shape: tuple[int, ...], slots: StateSlots, dtype: torch.dtype) -> torch.Tensor:
    """States in pages that are longer than they need be; NaN but where a request may read."""
    size = int(np.prod(shape))
    pages = torch.full((NUM_BLOCKS, size + 24), torch.nan, dtype=dtype)
    strides = torch.empty(shape).stride()
    state = pages.as_strided((NUM_BLOCKS, *shape), (size + 24, *strides), 8)
    for block in slots.read_blocks.tolist():
        if block >= 0:
            state[block] = torch.randn(shape)
    return state


def initial(state: torch.Tensor, slots: StateSlots, request: int) -> torch.Tensor:
    block = int(slots.read_blocks[request])
    return torch.zeros_like(state[0]).double() if block < 0 else state[block].double()


def written(slots: StateSlots) -> list[tuple[int, int]]:
    """(token, block) pairs."""
    return list(zip(slots.write_tokens.tolist(), slots.write_blocks.tolist(), strict=True))


def check_states(
    state: torch.Tensor, before: torch.Tensor, slots: StateSlots, want: dict[int, torch.Tensor]
) -> None:
    """What was to be written was, and nothing else."""
    for token, block in written(slots):
        torch.testing.assert_close(state[block].double(), want[token], atol=1e-4, rtol=1e-4)
    others = sorted(set(range(NUM_BLOCKS)) - set(slots.write_blocks.tolist()))
    torch.testing.assert_close(state[others], before[others], equal_nan=True, atol=0, rtol=0)
