"""How much of a real service's prompts does the KV cache find, beside an independent LRU?

    python benchmarks/replay.py TRACE.jsonl [--capacity N ...] [--overlap] [--limit ROWS]

A trace has a row for each request: `timestamp` (ms), `input_length` and `output_length` (tokens),
and `hash_ids`, one for each 512 prompt tokens or the rest of them; equal ids mean equal prefixes.
Capacities are in blocks of 512 tokens. Requests run one after another, or with --overlap from their
timestamp on for as long as prompt and answer take; then a request waits, and all behind it, until
its blocks are free. Of an answer the trace says how long it is, not what is in it: with --overlap
it takes blocks, which nobody finds.

What counts:

* Looked up are a prompt's whole blocks. The rest of a prompt and the answer are never found.
* A hit is a leading run of them that are all cached. The block with the last prompt token is never
  one: that token must be computed, since it gives the logits.
* Blocks of a running request are never evicted. When a request ends, its blocks become the most
  recently used, the deepest first, so that a prefix outlives what continues it.
* A request that needs more blocks than there are is left out.

`LeastRecentlyUsed` is written to these sentences alone, with an ordered dictionary, and finds the
same. There is one exception: a prompt of whole blocks that are all cached has its last block
computed again, and the pool then holds two copies of it, where a dictionary can hold one. Such
prompts are counted as "again"; without them both must find the same blocks in every request.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jubako.kv_cache import (
    BlockHash,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
)

BLOCK = 512
"""Tokens that one id of a trace stands for."""


@dataclass(frozen=True)
class Row:
    """A request of a trace. `timestamp` is in milliseconds."""

    number: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]

    @property
    def whole(self) -> Sequence[int]:
        """The ids of the prompt's whole blocks."""
        return self.hash_ids[: self.input_length // BLOCK]

    @property
    def findable(self) -> Sequence[int]:
        """Those that end before the last prompt token."""
        return self.hash_ids[: (self.input_length - 1) // BLOCK]


def read_trace(path: Path, limit: int | None = None) -> list[Row]:
    """The rows of a trace. ValueError for a row whose ids do not fit its length."""
    rows = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            fields = json.loads(line)
            row = Row(number, *(fields[name] for name in list(Row.__annotations__)[1:]))
            if len(row.hash_ids) != -(-row.input_length // BLOCK):
                raise ValueError(
                    f"{path}, row {number + 1}: {len(row.hash_ids)} hash_ids for "
                    f"{row.input_length} tokens; one for each {BLOCK} is expected"
                )
            rows.append(row)
    return rows


class Cache(Protocol):
    """Something that requests take blocks from."""

    def arrive(self, row: Row, num_tokens: int) -> int | None:
        """Blocks found, now that `num_tokens` tokens have room; None if they have none yet."""

    def leave(self, row: Row) -> None:
        """The request has ended."""


class LeastRecentlyUsed:
    """`capacity` blocks. Front of `idle`: the first to go."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.idle: OrderedDict[Any, None] = OrderedDict()
        """Cached, and of no running request."""
        self.owners: Counter[Any] = Counter()
        """How many running requests use a block."""
        self.running: dict[int, list[Any]] = {}
        self.computed_again = 0
        """Prompts whose last block was cached and had to be computed all the same."""

    def arrive(self, row: Row, num_tokens: int) -> int | None:
        """See `Cache`."""
        hits = 0
        for block in row.findable:
            if block not in self.idle and block not in self.owners:
                break
            hits += 1
        blocks: list[Any] = list(row.whole)
        # The rest is like nothing else.
        blocks += [(row.number, i) for i in range(len(blocks), -(-num_tokens // BLOCK))]
        idle_hits = sum(block in self.idle for block in blocks[:hits])
        if len(blocks) - hits + idle_hits > self.capacity - len(self.owners):
            return None
        self.computed_again += any(b in self.idle or b in self.owners for b in blocks[hits:])
        for block in blocks:
            self.idle.pop(block, None)
            self.owners[block] += 1
        while len(self.idle) + len(self.owners) > self.capacity:
            self.idle.popitem(last=False)
        self.running[row.number] = blocks
        return hits

    def leave(self, row: Row) -> None:
        """See `Cache`."""
        for block in reversed(self.running.pop(row.number)):
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self.idle[block] = None


@dataclass
class TraceRequest:
    """A row as the KV cache manager sees requests."""

    request_id: str
    num_tokens: int
    block_hashes: list[BlockHash]
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0
    awaits_admission: bool = True
    mm_features: Sequence[Any] | None = None
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Nobody knows them; their hashes are given."""
        return range(self.num_tokens)


class Pool:
    """The real cache, of one full-attention group with `capacity` blocks beside the null block."""

    def __init__(self, capacity: int) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype="bfloat16")
        self.manager = KVCacheManager(
            KVCacheConfig(capacity + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=capacity * BLOCK,
            hash_block_size=BLOCK,
        )
        self.running: dict[int, TraceRequest] = {}

    def arrive(self, row: Row, num_tokens: int) -> int | None:
        """See `Cache`."""
        hashes = [BlockHash(block.to_bytes(32, "little")) for block in row.whole]
        request = TraceRequest(str(row.number), row.input_length, hashes)
        found, hit_tokens = self.manager.get_computed_blocks(request)
        blocks = self.manager.allocate_slots(
            request,
            num_tokens - hit_tokens,
            num_new_computed_tokens=hit_tokens,
            new_computed_blocks=found,
        )
        if blocks is None:
            return None
        request.num_computed_tokens = num_tokens
        self.running[row.number] = request
        return hit_tokens // BLOCK

    def leave(self, row: Row) -> None:
        """See `Cache`."""
        self.manager.free(self.running.pop(row.number))


@dataclass
class Tally:
    """What a replay found."""

    hits: int = 0
    looked_up: int = 0
    left_out: int = 0
    """Requests larger than the cache."""
    delayed: int = 0
    """Requests that waited for blocks."""
    hits_by_row: dict[int, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Share of the blocks looked up that were found."""
        return self.hits / self.looked_up if self.looked_up else 0.0


def replay(
    rows: Iterable[Row],
    cache: Cache,
    capacity: int,
    *,
    overlap: bool = False,
    prefill_ms: float = 0.1,
    decode_ms: float = 20.0,
) -> Tally:
    """Run all rows, in order. `prefill_ms` is for a prompt token, `decode_ms` for one of output."""
    tally = Tally()
    ends: list[tuple[float, int, Row]] = []
    now = 0.0
    for row in rows:
        now = max(now, row.timestamp)
        while ends and ends[0][0] <= now:
            cache.leave(heapq.heappop(ends)[2])
        tokens = row.input_length + (row.output_length if overlap else 0)
        if -(-tokens // BLOCK) > capacity:
            tally.left_out += 1
            continue
        hits = cache.arrive(row, tokens)
        tally.delayed += hits is None
        while hits is None:
            now, _, ended = heapq.heappop(ends)
            cache.leave(ended)
            hits = cache.arrive(row, tokens)
        tally.hits += hits
        tally.looked_up += len(row.whole)
        tally.hits_by_row[row.number] = hits
        if overlap:
            computed = row.input_length - hits * BLOCK
            lifetime = computed * prefill_ms + row.output_length * decode_ms
            heapq.heappush(ends, (now + lifetime, row.number, row))
        else:
            cache.leave(row)
    for _, _, row in sorted(ends):
        cache.leave(row)
    return tally


def main() -> None:
    """Print a line for each capacity."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.jsonl")
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000, 100_000]
    )
    parser.add_argument("--overlap", action="store_true", help="requests run at the same time")
    parser.add_argument("--prefill-ms", type=float, default=0.1, help="of a prompt token")
    parser.add_argument("--decode-ms", type=float, default=20.0, help="of an output token")
    parser.add_argument("--limit", type=int, help="only so many rows")
    args = parser.parse_args()
    rows = read_trace(args.trace, args.limit)
    ids = {block for row in rows for block in row.whole}
    print(f"{len(rows):,} requests, {len(ids):,} different whole blocks of {BLOCK} tokens")
    titles = f"{'blocks':>9} {'pool':>9} {'LRU':>9} {'looked up':>10} {'again':>6} {'waited':>7}"
    print(titles, " left out")
    everything = sum(-(-(row.input_length + row.output_length) // BLOCK) for row in rows)
    for capacity in [*args.capacity, everything]:
        lru = LeastRecentlyUsed(capacity)
        by_pool, by_lru = (
            replay(
                rows,
                cache,
                capacity,
                overlap=args.overlap,
                prefill_ms=args.prefill_ms,
                decode_ms=args.decode_ms,
            )
            for cache in (Pool(capacity), lru)
        )
        print(
            f"{capacity:9,} {by_pool.rate:9.4%} {by_lru.rate:9.4%} {by_pool.looked_up:10,} "
            f"{lru.computed_again:6} {by_pool.delayed:7,}  {by_pool.left_out:,}"
        )


if __name__ == "__main__":
    main()
