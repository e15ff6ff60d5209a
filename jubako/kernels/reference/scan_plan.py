"""In which order does the reference bring recurrent states forward by one step's tokens?

Requests with one token take one step of their recurrence. The tokens of the others are cut into
chunks, and chunk d of every request is computed at once, so the number of operators grows with the
longest request, and temporaries hold one chunk a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from jubako.kernels.state_slots import StateSlots


@dataclass(frozen=True)
class Round:
    """Chunk d of every request that has one."""

    tokens: torch.Tensor
    """[c, Q]: token numbers; a short chunk is padded with its first token."""
    is_padding: torch.Tensor
    """[c, Q, 1]."""
    places: torch.Tensor
    """[t]: where in the flattened [c · Q] the tokens are that count."""
    token_ids: torch.Tensor
    """[t]: their token numbers."""
    written: torch.Tensor
    """[w]: chunks after which the state is kept."""
    write_blocks: torch.Tensor
    """[w]."""


@dataclass(frozen=True)
class ScanPlan:
    """Decodes have one token; the other requests are sorted by their chunks, most first."""

    decode_tokens: torch.Tensor
    decode_read: torch.Tensor
    decode_fresh: torch.Tensor | None
    """Decodes that start from zeros; None if there are none."""
    decode_write: torch.Tensor
    chunked_read: torch.Tensor
    chunked_fresh: torch.Tensor | None
    rounds: list[Round]


def initial_states(
    state: torch.Tensor, blocks: torch.Tensor, fresh: torch.Tensor | None
) -> torch.Tensor:
    """States of these blocks in float32, zeros for fresh ones; a new tensor."""
    if fresh is not None and len(fresh) == len(blocks):
        # A profiling run has no blocks at all.
        return state.new_zeros((len(blocks), *state.shape[1:]), dtype=torch.float32)
    read = state[blocks].float()
    if fresh is not None:
        read[fresh] = 0.0
    return read


def run_scan(
    plan: ScanPlan,
    state: torch.Tensor,
    step: Callable[[torch.Tensor, torch.Tensor], None],
    chunk: Callable[[torch.Tensor, Round], None],
) -> None:
    """Bring states forward by a plan, and keep those that are to be kept in `state`.

    `step(running, tokens)` computes one token of each decode, `chunk(running, part)` one round.
    Both change the first states of `running`, which are float32 and new.
    """
    if plan.decode_tokens.numel():
        running = initial_states(state, plan.decode_read, plan.decode_fresh)
        step(running, plan.decode_tokens)
        state[plan.decode_write] = running.to(state.dtype)
    if plan.rounds:
        running = initial_states(state, plan.chunked_read, plan.chunked_fresh)
        for part in plan.rounds:
            chunk(running, part)
            if part.written.numel():
                state[part.write_blocks] = running[part.written].to(state.dtype)


def scan_plan(slots: StateSlots, chunk: int, device: torch.device) -> ScanPlan:
    """The plan for chunks of at most `chunk` tokens, made once a step."""
    key = ("scan", chunk, device)
    plan = slots.plans.get(key)
    if plan is None:
        plan = slots.plans[key] = _make_plan(slots, chunk, device)
    return plan


def _make_plan(slots: StateSlots, chunk: int, device: torch.device) -> ScanPlan:
    starts, lens = slots.query_start_loc, slots.query_lens
    writes: list[dict[int, int]] = [{} for _ in lens]
    for request, token, block in zip(
        slots.write_requests.tolist(), slots.write_tokens.tolist(), slots.write_blocks.tolist()
    ):
        writes[request][token + 1] = block
    # A request whose state is not kept is computed for its outputs alone, as in a profiling run.
    decodes = [i for i in (lens == 1).nonzero()[0].tolist() if writes[i]]
    chunks = {
        i: _chunks(int(starts[i]), int(starts[i + 1]), writes[i], chunk)
        for i in range(len(lens))
        if lens[i] > 1 or (lens[i] == 1 and not writes[i])
    }
    order = sorted(chunks, key=lambda i: -len(chunks[i]))

    def tensor(values: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

    def read(requests: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        blocks = slots.read_blocks[requests] if requests else np.zeros(0, np.int64)
        fresh = (blocks < 0).nonzero()[0]
        return tensor(np.maximum(blocks, 0)), tensor(fresh) if len(fresh) else None

    rounds = []
    for depth in range(len(chunks[order[0]]) if order else 0):
        bounds = [chunks[i][depth] for i in order if depth < len(chunks[i])]
        ends = np.asarray([end for _, end in bounds])
        first = np.asarray([start for start, _ in bounds])
        tokens = first[:, None] + np.arange(int((ends - first).max()))
        padding = tokens >= ends[:, None]
        places = (~padding).reshape(-1).nonzero()[0]
        kept = [
            (place, writes[i][end])
            for place, (i, (_, end)) in enumerate(zip(order, bounds))
            if end in writes[i]
        ]
        rounds.append(
            Round(
                tokens=tensor(np.where(padding, first[:, None], tokens)),
                is_padding=torch.from_numpy(padding[..., None]).to(device),
                places=tensor(places),
                token_ids=tensor(tokens.reshape(-1)[places]),
                written=tensor([place for place, _ in kept]),
                write_blocks=tensor([block for _, block in kept]),
            )
        )
    decode_read, decode_fresh = read(decodes)
    chunked_read, chunked_fresh = read(order)
    return ScanPlan(
        decode_tokens=tensor([int(starts[i]) for i in decodes]),
        decode_read=decode_read,
        decode_fresh=decode_fresh,
        decode_write=tensor([writes[i][int(starts[i + 1])] for i in decodes]),
        chunked_read=chunked_read,
        chunked_fresh=chunked_fresh,
        rounds=rounds,
    )


def _chunks(start: int, end: int, writes: dict[int, int], chunk: int) -> list[tuple[int, int]]:
    """Bounds of the chunks of tokens `start` to `end`; one ends wherever a state is kept."""
    cuts = sorted({*(cut for cut in writes if start < cut < end), end})
    chunks = []
    for cut in cuts:
        for first in range(start, cut, chunk):
            chunks.append((first, min(first + chunk, cut)))
        start = cut
    return chunks
