"""Which beginnings of prompts need not be hashed again?

Prompts share their beginnings: a system prompt, the earlier turns of a chat. Comparing bytes costs
a hundredth of hashing them.
"""

from __future__ import annotations

from jubako.kv_cache.blocks import BlockHash

MAX_CHAINS = 64
MAX_BLOCKS = 2048
"""Of one chain; what lies behind is hashed every time."""


class ChainMemory:
    """The last prompt with each first block, for the `MAX_CHAINS` first blocks seen last.

    Prompts are given as token bytes, `block_bytes` a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._none_hash = b""
        self._chains: dict[bytes, tuple[bytes, list[BlockHash]]] = {}

    def get(self, none_hash: bytes, tokens: bytes) -> list[BlockHash]:
        """The hashes of the leading blocks that were seen before behind the same `none_hash`."""
        if none_hash != self._none_hash:
            self._chains.clear()
            self._none_hash = none_hash
        chain = self._chains.get(tokens[: self._block_bytes])
        if chain is None:
            return []
        known, hashes = chain
        least, most = 1, min(len(hashes), len(tokens) // self._block_bytes)
        while least < most:
            middle = (least + most + 1) // 2
            if tokens.startswith(known[: middle * self._block_bytes]):
                least = middle
            else:
                most = middle - 1
        return hashes[:least]

    def put(self, tokens: bytes, hashes: list[BlockHash]) -> None:
        """Remember a prompt of whole blocks, at least one, in place of what began like it."""
        first = tokens[: self._block_bytes]
        self._chains.pop(first, None)
        if len(self._chains) >= MAX_CHAINS:
            del self._chains[next(iter(self._chains))]
        self._chains[first] = tokens[: MAX_BLOCKS * self._block_bytes], hashes[:MAX_BLOCKS]
