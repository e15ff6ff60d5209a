"""Beginnings that are not hashed again have the hashes that hashing them again would give."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from jubako.kv_cache import (
    chain_memory,
    get_hash_fn_by_name,
    get_request_block_hasher,
    hashing,
    request_hashing,
)
from jubako.kv_cache.chain_memory import ChainMemory
from jubako.kv_cache.hashing import blake2b, hash_block_tokens


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of tokens that were hashed, one entry a call."""
    sizes: list[int] = []
    chain = request_hashing.blake2b_chain

    def counting(parent: bytes, tokens: bytes, block_bytes: int) -> list[hashing.BlockHash]:
        sizes.append(len(tokens))
        return chain(parent, tokens, block_bytes)

    monkeypatch.setattr(request_hashing, "blake2b_chain", counting)
    return sizes


def hash_prompt(
    tokens: list[int], hasher: request_hashing.RequestBlockHasher
) -> list[hashing.BlockHash]:
    request: Any = SimpleNamespace(
        all_token_ids=tokens,
        num_tokens=len(tokens),
        block_hashes=[],
        mm_features=None,
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
    )
    return hasher(request)


def one_by_one(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - 3, 4):
        parent = hashing.BlockHash(hashes[-1]) if hashes else None
        hashes.append(hash_block_tokens(blake2b, parent, tokens[start : start + 4]))
    return hashes


def hasher_of_4() -> request_hashing.RequestBlockHasher:
    return get_request_block_hasher(4, get_hash_fn_by_name("blake2b"))


def test_random_prompts_that_share_beginnings():
    rng = random.Random(0)
    hasher = hasher_of_4()
    pool = [[rng.randrange(9) for _ in range(60)] for _ in range(3)]
    for _ in range(300):
        tokens = rng.choice(pool)[: rng.randrange(61)] + [
            rng.randrange(9) for _ in range(rng.randrange(20))
        ]
        assert hash_prompt(tokens, hasher) == one_by_one(tokens)


def test_only_what_is_new_is_hashed(hashed: list[int]):
    hasher = hasher_of_4()
    hash_prompt(list(range(42)), hasher)
    hash_prompt([*range(26), 99, *range(27, 42)], hasher)
    hash_prompt([*range(26), 99, *range(27, 47)], hasher)
    hash_prompt([98, *range(1, 42)], hasher)
    assert hashed == [40 * 4, (40 - 24) * 4, 4 * 4, 40 * 4]


def test_another_none_hash_ends_all_chains(monkeypatch: pytest.MonkeyPatch):
    hasher = hasher_of_4()
    tokens = list(range(20))
    before = hash_prompt(tokens, hasher)
    monkeypatch.setattr(hashing, "NONE_HASH", hashing.BlockHash(b"n" * 32))
    after = hash_prompt(tokens, hasher)
    assert after == one_by_one(tokens)
    assert set(after).isdisjoint(before)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chain_memory, "MAX_CHAINS", 2)
    monkeypatch.setattr(chain_memory, "MAX_BLOCKS", 3)
    memory = ChainMemory(1)
    hashes = [hashing.BlockHash(b"%d" % i) for i in range(5)]
    for tokens in (b"abcde", b"bcdef", b"abxyz", b"cdefg"):
        assert memory.get(b"none", tokens) == (hashes[:2] if tokens == b"abxyz" else [])
        memory.put(tokens, hashes)
    assert memory.get(b"none", b"bcdef") == []
    assert memory.get(b"none", b"abxyz") == hashes[:3]
    assert memory.get(b"other", b"abxyz") == []
