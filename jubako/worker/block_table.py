"""In which KV block, and at which slot, does each token of each row lie?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jubako.kv_cache.specs import cdiv
from jubako.worker.request_state import CachedRequestState

IntArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ContextParallel:
    """How positions are spread over the ranks that share a context.

    `rank` is `prefill rank * decode size + decode rank`; `interleave` neighbouring tokens stay on
    one rank. One rank holds everything.
    """

    world_size: int = 1
    rank: int = 0
    interleave: int = 1

    def local_length(self, length: IntArray | int) -> Any:
        """How many of the first `length` positions lie on this rank."""
        size, interleave = self.world_size, self.interleave
        base = length // interleave // size * interleave
        rest = length - base * size - self.rank * interleave
        return base + np.clip(rest, 0, interleave)


class BlockTable:
    """Block ids of every row of one KV group, on the host.

    `table` [R, width] int32 holds ids of kernel blocks: where the kernel's block is smaller than
    the manager's, manager block b is b*s, ..., b*s + s-1 with s = block_size / kernel_block_size.
    Every row begins with the blocks of the group's sink tokens, if it has any: position 0 comes
    after them. Entries past a row's count are stale and never read.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        kernel_block_size: int | None = None,
        context_parallel: ContextParallel | None = None,
        sink_blocks: Sequence[int] = (),
    ) -> None:
        """`max_num_blocks_per_req` counts manager blocks, as do the ids in `sink_blocks`."""
        self.kernel_block_size = block_size if kernel_block_size is None else kernel_block_size
        if block_size % self.kernel_block_size:
            raise ValueError(
                f"The kernel's block size {self.kernel_block_size} does not divide the KV block "
                f"size {block_size}."
            )
        self.block_size = block_size
        self._split = block_size // self.kernel_block_size
        self._parallel = context_parallel or ContextParallel()
        self.sink_blocks = sinks = self.kernel_blocks(sink_blocks)
        if len(sinks) and self._parallel.world_size > 1:
            raise ValueError("Sink tokens cannot be divided among ranks that share a context.")
        self.num_sink_tokens = len(sinks) * self.kernel_block_size
        width = len(sinks) + max_num_blocks_per_req * self._split
        self.table: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(
            (max_num_reqs, width), dtype=np.int32
        )
        self.table[:, : len(sinks)] = sinks
        self.num_blocks_per_row: np.ndarray[Any, np.dtype[np.int32]] = np.full(
            max_num_reqs, len(sinks), dtype=np.int32
        )
        self.slot_mapping: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(
            max_num_batched_tokens, dtype=np.int64
        )

    def kernel_blocks(self, block_ids: Sequence[int]) -> IntArray:
        """The kernel's blocks of the manager's blocks, in order."""
        ids: np.ndarray[Any, Any] = np.asarray(block_ids, dtype=np.int32)
        if self._split > 1:
            ids = (ids[:, None] * self._split + np.arange(self._split, dtype=np.int32)).ravel()
        return ids

    def row(self, row: int) -> IntArray:
        """Kernel blocks of a row, those of sinks included."""
        return self.table[row, : self.num_blocks_per_row[row]]

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Add blocks to a row."""
        if not block_ids:
            return
        ids = self.kernel_blocks(block_ids)
        start = int(self.num_blocks_per_row[row])
        end = start + len(ids)
        assert end <= self.table.shape[1], (
            f"{end} blocks in a row, the table has room for {self.table.shape[1]}"
        )
        self.table[row, start:end] = ids
        self.num_blocks_per_row[row] = end

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        """Give a row these blocks and no others."""
        self.clear_row(row)
        self.append_row(block_ids, row)

    def clear_row(self, row: int) -> None:
        """Give a row no blocks but those of sinks."""
        self.num_blocks_per_row[row] = len(self.sink_blocks)

    def move_row(self, source: int, target: int) -> None:
        """Bring the blocks of `source` to `target`; `source` has none then."""
        count = self.num_blocks_per_row[source]
        self.table[target, :count] = self.table[source, :count]
        self.num_blocks_per_row[target] = count
        self.clear_row(source)

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        longest = int(self.num_blocks_per_row[[first, second]].max())
        self.table[[first, second], :longest] = self.table[[second, first], :longest]
        self.num_blocks_per_row[[first, second]] = self.num_blocks_per_row[[second, first]]

    def compute_slot_mapping(
        self,
        req_indices: IntArray,
        positions: IntArray,
        places: tuple[IntArray, IntArray] | None = None,
    ) -> IntArray:
        """Slots [T] int64 of tokens at `positions` [T] of rows `req_indices` [T], kept in place.

        The slot of a token is `block * kernel_block_size + offset`; -1 where another rank has it.
        `places` are the positions' blocks and offsets, if another table had them already.
        """
        size, parallel = self.kernel_block_size, self._parallel
        slots = self.slot_mapping[: len(positions)]
        flat = self.table.reshape(-1)
        if parallel.world_size == 1:
            block, offset = places or self.places(positions)
            np.multiply(flat[req_indices * self.table.shape[1] + block], size, out=slots)
            slots += offset
            return slots
        world, interleave = parallel.world_size, parallel.interleave
        block, offset = np.divmod(positions, size * world)
        ids = flat[req_indices * self.table.shape[1] + block].astype(np.int64)
        round_number, within = np.divmod(offset, world * interleave)
        local = within // interleave == parallel.rank
        slot = ids * size + round_number * interleave + offset % interleave
        slots[:] = np.where(local, slot, -1)
        return slots

    def places(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Number of the block in its row, and offset in it, of each of `positions`."""
        return np.divmod(positions + self.num_sink_tokens, self.kernel_block_size)


class MultiGroupBlockTable:
    """One `BlockTable` a KV group; every call goes to all of them.

    It is also a field of the batch's rows. Tables of `encoder_groups` are for the encoder's outputs
    instead of the requests' own tokens.
    """

    def __init__(self, tables: Sequence[BlockTable], encoder_groups: Collection[int] = ()) -> None:
        self._tables = list(tables)
        self.encoder_groups = frozenset(encoder_groups)

    @classmethod
    def build(
        cls,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int],
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        context_parallel: ContextParallel | None = None,
        sink_blocks: Sequence[Sequence[int]] | None = None,
        encoder_groups: Collection[int] = (),
        max_num_encoder_tokens: int = 0,
    ) -> MultiGroupBlockTable:
        """Tables wide enough for requests of `max_model_len` tokens.

        `sink_blocks` are those of each group. Groups `encoder_groups` have room for
        `max_num_encoder_tokens` of the encoder, in a row and in a step.
        """
        sinks = sink_blocks or [()] * len(block_sizes)
        parallel = context_parallel or ContextParallel()
        tables = []
        for group, (block_size, kernel_block_size, group_sinks) in enumerate(
            zip(block_sizes, kernel_block_sizes, sinks, strict=True)
        ):
            longest, step = max_model_len, max_num_batched_tokens
            if group in encoder_groups:
                longest = step = max_num_encoder_tokens
            tables.append(
                BlockTable(
                    block_size,
                    max_num_reqs,
                    cdiv(longest, block_size * parallel.world_size),
                    step,
                    kernel_block_size,
                    parallel,
                    group_sinks,
                )
            )
        return cls(tables, encoder_groups)

    def __getitem__(self, group: int) -> BlockTable:
        return self._tables[group]

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def append_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Add blocks, one list a group, to a row."""
        for table, ids in zip(self._tables, block_ids, strict=True):
            table.append_row(ids, row)

    def add_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Give a row these blocks, one list a group, and no others."""
        for table, ids in zip(self._tables, block_ids, strict=True):
            table.add_row(ids, row)

    def compute_slot_mapping(self, req_indices: IntArray, positions: IntArray) -> None:
        """Compute the `slot_mapping` of every group that keeps the requests' own tokens."""
        known: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}
        for group, table in enumerate(self._tables):
            if group not in self.encoder_groups:
                key = (table.kernel_block_size, table.num_sink_tokens)
                if key not in known:
                    known[key] = table.places(positions)
                table.compute_slot_mapping(req_indices, positions, known[key])

    # As a field of the batch's rows.

    def add(self, row: int, request: CachedRequestState) -> None:
        """Take a request's blocks."""
        self.add_row(request.block_ids, row)

    def clear(self, row: int) -> None:
        """Give a row no blocks."""
        for table in self._tables:
            table.clear_row(row)

    def move(self, source: int, target: int) -> None:
        """Bring a row's blocks to another row."""
        for table in self._tables:
            table.move_row(source, target)

    def swap(self, first: int, second: int) -> None:
        """Exchange two rows' blocks."""
        for table in self._tables:
            table.swap_row(first, second)


def select_kernel_block_size(block_size: int, supported: Sequence[Sequence[int] | None]) -> int:
    """The block size that the kernels of a KV group see.

    `supported` lists, for each attention backend of the group, the sizes it accepts (None: any). It
    is the manager's `block_size` if all accept that, otherwise the largest listed size that divides
    it and that all accept. ValueError if there is none.
    """

    def accepted(size: int) -> bool:
        return all(sizes is None or size in sizes for sizes in supported)

    if accepted(block_size):
        return block_size
    listed = {size for sizes in supported for size in sizes or ()}
    fitting = [size for size in listed if block_size % size == 0 and accepted(size)]
    if not fitting:
        raise ValueError(
            f"No block size suits all attention kernels with KV blocks of {block_size} tokens; "
            f"they accept {sorted(listed)}."
        )
    return max(fitting)
