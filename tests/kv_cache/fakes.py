"""A request, specs and managers small enough to follow by hand: blocks of 4 tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jubako.kv_cache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    get_hash_fn_by_name,
    get_request_block_hasher,
    init_none_hash,
)

NIGHTLY = os.environ.get("JUBAKO_NIGHTLY") == "1"

HASH = get_hash_fn_by_name("blake2b")
init_none_hash(HASH)

ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}


def full(block_size: int = 4, **kwargs: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **{**ATTENTION, **kwargs})


def window(sliding_window: int, block_size: int = 4, **kwargs: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, sliding_window=sliding_window, **{**ATTENTION, **kwargs}
    )


def chunked(chunk: int, block_size: int = 4, **kwargs: Any) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=chunk, **{**ATTENTION, **kwargs}
    )


def mamba(mode: str = "align", sp: int = 0, block_size: int = 4) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((64,),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=sp,
    )


def cross(block_size: int = 4) -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size=block_size, **ATTENTION)


def sink(sink_len: int, block_size: int = 4) -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(block_size=block_size, sink_len=sink_len, **ATTENTION)


def config_of(specs: list[KVCacheSpec], num_blocks: int, eagle: set[int] = frozenset()) -> Any:
    groups = [
        KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=i in eagle)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks, [], groups)


def make_manager(
    *specs: KVCacheSpec,
    num_blocks: int = 100,
    max_model_len: int = 1000,
    hash_block_size: int = 4,
    **kwargs: Any,
) -> KVCacheManager:
    eagle = kwargs.pop("eagle_groups", frozenset())
    return KVCacheManager(
        config_of(list(specs), num_blocks, eagle), max_model_len, hash_block_size, **kwargs
    )


def engine_config(**values: Any) -> SimpleNamespace:
    """The parts of an engine configuration that sizes depend on."""

    def pick(**defaults: Any) -> SimpleNamespace:
        return SimpleNamespace(**{k: values.get(k, v) for k, v in defaults.items()})

    return SimpleNamespace(
        model_config=pick(max_model_len=8192, original_max_model_len=None),
        cache_config=pick(
            block_size=16,
            num_gpu_blocks_override=None,
            enable_prefix_caching=True,
            mamba_cache_mode="none",
            hash_block_size=None,
        ),
        scheduler_config=pick(
            max_num_batched_tokens=2048,
            max_num_encoder_input_tokens=1500,
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=pick(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        kv_transfer_config=values.get("kv_transfer_config"),
    )


@dataclass
class FakeRequest:
    """Satisfies `KVCacheRequest`."""

    request_id: str
    all_token_ids: list[int]
    hash_block_size: int = 4
    hash_fn: Any = HASH
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0
    awaits_admission: bool = True
    mm_features: list[Any] | None = None
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    block_hashes: list[Any] = field(default_factory=list)
    num_registered_tokens: int = 0
    """Tokens that were known, and up for registering, at the last caching call."""

    def __post_init__(self) -> None:
        self.hasher = get_request_block_hasher(self.hash_block_size, self.hash_fn)
        self.extend()

    def extend(self, tokens: list[int] = ()) -> None:
        self.all_token_ids += list(tokens)
        self.block_hashes += self.hasher(self)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request(request_id: str, tokens: Any, **kwargs: Any) -> FakeRequest:
    """`tokens`: a list, or how many, counted up from 0."""
    if isinstance(tokens, int):
        tokens = range(tokens)
    return FakeRequest(request_id, list(tokens), **kwargs)


def feature(identifier: str, offset: int, length: int) -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def lora(name: str, load_generation: int = 0) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=1, load_generation=load_generation)


def step(
    manager: KVCacheManager, req: FakeRequest, num_new_tokens: int, **kwargs: Any
) -> list[list[int]] | None:
    """Allocate, and count the tokens as computed. The new ids of each group, or None."""
    blocks = manager.allocate_slots(req, num_new_tokens, **kwargs)
    if blocks is None:
        return None
    req.num_computed_tokens += (
        num_new_tokens
        + kwargs.get("num_new_computed_tokens", 0)
        + kwargs.get("num_external_computed_tokens", 0)
    )
    req.awaits_admission = False
    return list(blocks.get_block_ids())


def admit(
    manager: KVCacheManager, req: FakeRequest, num_new_tokens: int | None = None, **kwargs: Any
) -> int | None:
    """Look up and allocate as a scheduler does. The length of the hit, or None."""
    blocks, hit = manager.get_computed_blocks(req)
    if num_new_tokens is None:
        num_new_tokens = req.num_tokens - hit
    added = step(
        manager,
        req,
        num_new_tokens,
        num_new_computed_tokens=hit,
        new_computed_blocks=blocks,
        **kwargs,
    )
    return None if added is None else hit


def table(manager: KVCacheManager, req: FakeRequest, group: int = 0) -> list[int]:
    return manager.get_block_ids(req.request_id)[group]


def queue(manager: KVCacheManager) -> list[int]:
    return [b.block_id for b in manager.block_pool.free_block_queue.get_all_free_blocks()]


def hashed(manager: KVCacheManager) -> list[int]:
    return [b.block_id for b in manager.block_pool.blocks if b.block_hash is not None]
