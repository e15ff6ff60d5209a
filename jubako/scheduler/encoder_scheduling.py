"""Which media items must be encoded for a chunk of a prompt, and how far can the chunk go?"""

from __future__ import annotations

from dataclasses import dataclass, field

from jubako.scheduler.encoder_cache import EncoderCacheManager
from jubako.scheduler.protocols import ECConnector
from jubako.scheduler.request import Request


@dataclass(slots=True)
class EncoderChunk:
    """The media side of one request's chunk in one step."""

    num_new_tokens: int
    """Tokens of the chunk, cut where an item cannot be had."""
    compute_budget: int
    """Embeddings that may still be encoded in this step."""
    inputs: list[int] = field(default_factory=list)
    """Items to encode."""
    external: list[int] = field(default_factory=list)
    """Items to load through the encoder-cache connector."""
    repeated: list[int] = field(default_factory=list)
    """Items equal to an earlier one of these two lists."""
    claimed: list[int] = field(default_factory=list)
    """Items found in the cache, newly held by the request."""
    is_cut: bool = False
    """Whether the chunk ends before an item that cannot be had."""


def plan_encoder_chunk(
    request: Request,
    num_computed_tokens: int,
    num_new_tokens: int,
    compute_budget: int,
    cache: EncoderCacheManager,
    *,
    split_items: bool = True,
    ec_connector: ECConnector | None = None,
    shift: int = 0,
    is_encoder_decoder: bool = False,
) -> EncoderChunk:
    """Decide for the tokens `[num_computed_tokens, num_computed_tokens + num_new_tokens)`.

    An item is encoded whole or not at all, though its positions may be computed over several
    chunks if `split_items`. `shift` is how many positions further a drafter looks. Items found in
    the cache are held at once: a caller that does not schedule the chunk must give them back with
    `release_claims`. The others are only promised; `commit` takes them. What is being loaded
    outside steps cannot be had yet. An encoder-decoder model reads its items before its first token
    only, all of them, wherever they stand.
    """
    chunk = EncoderChunk(num_new_tokens, compute_budget)
    start = num_computed_tokens
    promised = 0
    seen: set[str] = set()
    for input_id, feature in enumerate(request.mm_features):
        position = feature.mm_position
        first, end = position.offset, position.offset + position.length
        if is_encoder_decoder:
            first, end = 0, 1
        stop = start + chunk.num_new_tokens
        if first >= stop + shift:
            break
        if end <= start:
            continue
        if not split_items and stop < end:
            chunk.num_new_tokens = max(first - start, 0)
            chunk.is_cut = True
            break
        identifier = feature.identifier
        if identifier in seen and not is_encoder_decoder:
            chunk.repeated.append(input_id)
            continue
        if identifier in cache.loading:
            chunk.num_new_tokens = max(first - start, 0)
            chunk.is_cut = True
            break
        held = (request.request_id, input_id) in cache.cached.get(identifier, ())
        if held or cache.check_and_update_cache(request, input_id):
            if not held:
                chunk.claimed.append(input_id)
            continue
        if not is_encoder_decoder and not _needs_embeddings(
            position.is_embed, first, start, min(stop + shift, end)
        ):
            continue
        size = request.media_embeds[input_id]
        if (
            ec_connector is not None
            and ec_connector.has_cache_item(identifier)
            and cache.make_room(size + promised)
        ):
            chunk.external.append(input_id)
        elif cache.can_allocate(request, input_id, chunk.compute_budget, promised):
            chunk.inputs.append(input_id)
            chunk.compute_budget -= size
        else:
            chunk.num_new_tokens = max(first - start, 0)
            chunk.is_cut = True
            break
        promised += size
        seen.add(identifier)
    return chunk


def _needs_embeddings(is_embed: list[bool] | None, first: int, start: int, stop: int) -> bool:
    if is_embed is None:
        return True
    return any(is_embed[max(start - first, 0) : stop - first])


def commit(
    request: Request,
    chunk: EncoderChunk,
    cache: EncoderCacheManager,
    ec_connector: ECConnector | None = None,
) -> None:
    """The chunk runs: hold its items. Without `ec_connector` the loads are left to the caller."""
    for input_id in chunk.inputs:
        cache.allocate(request, input_id)
    for input_id in chunk.external:
        cache.allocate(request, input_id)
        if ec_connector is not None:
            ec_connector.update_state_after_alloc(request, input_id)
    for input_id in chunk.repeated:
        cache.allocate(request, input_id)


def release_claims(request: Request, chunk: EncoderChunk, cache: EncoderCacheManager) -> None:
    """The chunk does not run: give back what it found in the cache."""
    for input_id in chunk.claimed:
        cache.free_encoder_input(request, input_id)
