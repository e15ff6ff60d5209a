"""What, beside its tokens, makes the KV of a request's block what it is?

Adapters, media, the tenant's salt and prompt embeddings change KV without changing token ids. They
enter the block hashes as extra keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from struct import Struct
from typing import Any

from jubako.kv_cache import hashing
from jubako.kv_cache.blocks import BlockHash
from jubako.kv_cache.chain_memory import ChainMemory
from jubako.kv_cache.checks import check_positive
from jubako.kv_cache.hashing import (
    HashFunction,
    blake2b,
    blake2b_block,
    blake2b_chain,
    blake2b_next,
    hash_block_tokens,
    init_none_hash,
    token_bytes,
)
from jubako.kv_cache.request import HashedRequest

ExtraKeys = tuple[Any, ...] | None
RequestBlockHasher = Callable[[HashedRequest], list[BlockHash]]

_TOKEN_BYTES = 4


def need_extra_keys(request: HashedRequest) -> bool:
    """True if tokens alone may not decide the KV. Advisory: prompt embeddings are not counted."""
    return bool(request.mm_features or request.lora_request or request.cache_salt is not None)


def generate_block_hash_extra_keys(
    request: HashedRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[ExtraKeys, int]:
    """Extra keys of the block of tokens `[start, end)`, and the media item to go on from.

    In this order: adapter, media, salt (first block only), prompt embeddings; None if there are
    none. `start_mm_idx` is the first media item to look at; negative counts from the end.
    """
    keys: list[Any] = []
    if lora := request.lora_request:
        keys.append(lora.lora_name)
        # Other weights under the same name must not find the old KV.
        if generation := getattr(lora, "load_generation", 0):
            keys.append(generation)
    media, next_mm_idx = _media_keys(
        request.mm_features or (), start_token_idx, end_token_idx, start_mm_idx
    )
    keys += media
    if start_token_idx == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    if request.prompt_embeds is not None:
        rows = request.prompt_embeds[start_token_idx:end_token_idx]
        keys.append(sha256(rows.tobytes() if hasattr(rows, "tobytes") else rows).digest())
    return tuple(keys) or None, next_mm_idx


def _media_keys(features: Sequence[Any], start: int, end: int, index: int) -> tuple[list[Any], int]:
    if not features:
        return [], index
    if index < 0:
        index += len(features)
    keys = []
    for feature in features[index:]:
        position = feature.mm_position
        if position.offset >= end:
            break
        if position.offset + position.length > start:
            # The distance tells apart the same item at another place among equal placeholders.
            keys.append((feature.identifier, position.offset - start))
    # Ranges may overlap (the sound of a video), so only a completed item at the front is passed by.
    while index < len(features):
        position = features[index].mm_position
        if position.offset + position.length > end:
            break
        index += 1
    return keys, index


def get_request_block_hasher(block_size: int, caching_hash_fn: HashFunction) -> RequestBlockHasher:
    """A function that returns the hashes of the blocks of a request that became full since its last
    call: those from `len(request.block_hashes)` on. The caller appends them to `block_hashes`."""
    check_positive("block_size", block_size, "block_size")
    if not hashing.NONE_HASH:
        init_none_hash(caching_hash_fn)

    pack_block = Struct(f"<{block_size}i").pack
    memory = ChainMemory(block_size * _TOKEN_BYTES)

    def hash_full_blocks(request: HashedRequest) -> list[BlockHash]:
        known = len(request.block_hashes)
        full = request.num_tokens // block_size
        if full <= known:
            return []
        if (
            full == known + 1
            and known
            and caching_hash_fn is blake2b
            and not request.mm_features
            and not request.lora_request
            and request.prompt_embeds is None
        ):
            # A decode has filled a block: nothing but its tokens counts.
            tokens = request.all_token_ids[known * block_size : full * block_size]
            return [blake2b_next(request.block_hashes[-1], pack_block(*tokens))]
        return _hash_blocks(request, known, full, block_size, caching_hash_fn, memory)

    return hash_full_blocks


def _hash_blocks(
    request: HashedRequest,
    known: int,
    full: int,
    block_size: int,
    hash_fn: HashFunction,
    memory: ChainMemory,
) -> list[BlockHash]:
    first = known * block_size
    tokens: Any = request.all_token_ids
    fast = hash_fn is blake2b
    stride = block_size * _TOKEN_BYTES if fast else block_size
    if fast and not known:
        # Bytes are cheaper to cut than lists.
        tokens = token_bytes(tokens)[: full * stride]
    else:
        tokens = tokens[first : full * block_size]
        if fast:
            tokens = token_bytes(tokens)
    parent = request.block_hashes[-1] if known else hashing.NONE_HASH
    plain = not need_extra_keys(request) and request.prompt_embeds is None
    if fast and plain:
        if known:
            return blake2b_chain(parent, tokens, stride)
        found = memory.get(parent, tokens)
        rest = tokens[len(found) * stride :] if found else tokens
        found += blake2b_chain(found[-1] if found else parent, rest, stride)
        memory.put(tokens, found)
        return found
    # Begins at the first item that is not over yet: a later item must never hide an earlier one.
    mm_idx = 0 if plain else _first_open_item(request.mm_features or (), first)
    keys: ExtraKeys = None
    hashes = []
    for index in range(full - known):
        chunk = tokens[index * stride : (index + 1) * stride]
        if not plain:
            start = first + index * block_size
            keys, mm_idx = generate_block_hash_extra_keys(
                request, start, start + block_size, mm_idx
            )
        if fast:
            if known + index == 0 and request.cache_salt and not request.lora_request:
                # A salt is the client's choice: it must not pass for the name of an adapter. The
                # other algorithms keep the form that other engines use.
                keys = ("", *(keys or ()))
            parent = BlockHash(blake2b_block(parent, chunk, keys))
        else:
            parent = hash_block_tokens(hash_fn, parent, chunk, keys)
        hashes.append(parent)
    return hashes


def _first_open_item(features: Sequence[Any], start: int) -> int:
    for index, feature in enumerate(features):
        position = feature.mm_position
        if position.offset + position.length > start:
            return index
    return len(features)
