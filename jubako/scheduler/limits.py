"""Which options fit together, and which requests can run at all?"""

from __future__ import annotations

from math import isfinite

from jubako.config import JubakoConfig
from jubako.errors import ConfigError, NotImplementedFeatureError, ValidationError
from jubako.kv_cache import KVCacheConfig
from jubako.scheduler.request import Request, RequestStatus

DEFAULT_BLOCK_SIZE = 16
"""Of a model without KV, where nothing depends on it."""


def resolve_max_model_len(config: JubakoConfig, kv_cache_config: KVCacheConfig) -> int:
    """The longest context in tokens; without `max_model_len`, as much as the cache holds."""
    length = config.model_config.max_model_len
    if length is not None:
        return length
    groups = kv_cache_config.kv_cache_groups
    size = min((g.kv_cache_spec.block_size for g in groups), default=DEFAULT_BLOCK_SIZE)
    return max(kv_cache_config.num_blocks - 1, 1) * size


def check_options(config: JubakoConfig, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
    """Raise `ConfigError` for options with which some request could never run."""
    options = config.scheduler_config
    budget, seqs = options.token_budget, options.seq_limit
    if seqs > budget:
        raise ConfigError(
            f"max_num_seqs={seqs} is more than max_num_batched_tokens={budget}; every running "
            "request needs at least one token a step.",
            "max_num_seqs",
        )
    if not options.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={max_model_len}, so "
            "without chunked prefill the longest prompts could never run; raise it, lower "
            "max_model_len, or set enable_chunked_prefill.",
            "max_num_batched_tokens",
        )
    if kv_cache_config.kv_cache_groups and kv_cache_config.num_blocks < 2:
        raise ConfigError(
            f"num_blocks={kv_cache_config.num_blocks} leaves no KV block for a request; at least 2 "
            "are needed, one of which is never used.",
            "num_gpu_blocks_override",
        )


def check_hooks(connector: object, ec_connector: object, *, is_encoder_decoder: bool) -> None:
    """Raise `ConfigError` for hooks that do not go with the model."""
    if ec_connector is not None and is_encoder_decoder:
        raise ConfigError(
            "ec_connector is set, but this model reads an encoder output in one step only, so none "
            "is kept that could be shared; leave it out.",
            "ec_connector",
        )
    if connector is not None and is_encoder_decoder:
        raise ConfigError(
            "kv_connector is set, but this model has cross attention, whose KV cannot be "
            "transferred; leave it out.",
            "kv_connector",
        )


def check_length(num_tokens: int, max_model_len: int, *, generates: bool = True) -> None:
    """Raise `ValidationError` for a prompt that is too long."""
    # A generating request needs a place for its first token.
    limit = max_model_len - generates
    if num_tokens > limit:
        raise ValidationError(
            f"The prompt has {num_tokens} tokens; at most {limit} fit a context of "
            f"{max_model_len}.",
            "prompt",
            num_tokens,
            code="context_length_exceeded",
        )


def check_session(request: Request) -> None:
    """Raise `NotImplementedFeatureError` for a piece of streaming input that cannot be taken."""
    if request.sampling_params is None:
        raise NotImplementedFeatureError("Streaming input works for generation only.", "resumable")
    if request.uses_grammar:
        raise NotImplementedFeatureError(
            "Streaming input does not work with structured outputs; leave one of them out.",
            "structured_outputs",
        )
    if request.prompt_token_ids is None:
        raise NotImplementedFeatureError(
            "Streaming input must be tokens, not embeddings.", "prompt_embeds"
        )


def check_order(request: Request) -> None:
    """Raise `ValidationError` for a request that cannot be told from others, or be put in line."""
    request_id = request.request_id
    if not isinstance(request_id, str):
        raise ValidationError(
            f"request_id must be a string, got {request_id!r}.", "request_id", request_id
        )
    if request.is_finished or request.num_computed_tokens or not is_new(request):
        raise ValidationError(
            f"Request {request_id!r} has been scheduled before; make a new one.", "request_id"
        )
    priority, arrival_time = request.priority, request.arrival_time
    if not isinstance(priority, int):
        raise ValidationError(f"priority must be an integer, got {priority!r}.", "priority")
    if not isinstance(arrival_time, (int, float)) or not isfinite(arrival_time):
        raise ValidationError(
            f"arrival_time must be a number of seconds, got {arrival_time!r}.", "arrival_time"
        )
    if request.sampling_params is not None and request.pooling_params is not None:
        raise ValidationError(
            "A request has sampling_params or pooling_params, not both.", "pooling_params"
        )


def is_new(request: Request) -> bool:
    """Whether no scheduler has had the request yet."""
    return request.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_FSM)


def check_media(request: Request) -> None:
    """Raise `ValidationError` unless the media stand in the prompt, one after the other."""
    embedded_to = offset = 0
    for feature in request.mm_features:
        position = feature.mm_position
        stop = position.offset + position.length
        if position.length < 1 or position.offset < offset or stop > request.num_prompt_tokens:
            raise ValidationError(
                f"A media item stands at {position.length} positions from {position.offset}; items "
                f"must be in order and inside the {request.num_prompt_tokens} tokens of the "
                "prompt.",
                "mm_features",
            )
        offset = position.offset
        mask = position.is_embed
        if mask is None:
            first, last = offset, stop
        elif len(mask) != position.length:
            raise ValidationError(
                f"is_embed has {len(mask)} entries for a media item of {position.length} "
                "positions.",
                "mm_features",
            )
        elif True not in mask:
            continue
        else:
            first = offset + mask.index(True)
            last = stop - mask[::-1].index(True)
        if first < embedded_to:
            raise ValidationError(
                f"Two media items want to be embedded at position {first}.", "mm_features"
            )
        embedded_to = last


def check_request(
    request: Request,
    *,
    max_model_len: int,
    policy: str,
    media_room: int,
    whole_items_up_to: int | None,
    has_grammars: bool,
    is_encoder_decoder: bool,
) -> None:
    """Raise `ValidationError` or `NotImplementedFeatureError` for a request that can never run.

    `media_room` is the largest media item, in embeddings, that can be encoded; `whole_items_up_to`
    the longest, in positions, where items may not be split. What an encoder-decoder model encodes
    stands nowhere in the prompt.
    """
    check_order(request)
    if request.resumable:
        check_session(request)
    if request.priority != 0 and policy != "priority":
        raise ValidationError(
            "priority must be 0 unless the engine runs with scheduling_policy=priority, "
            f"got {request.priority}.",
            "priority",
            request.priority,
        )
    if request.num_prompt_tokens == 0:
        raise ValidationError("The prompt is empty; it needs at least one token.", "prompt")
    generates = request.sampling_params is not None
    check_length(request.num_prompt_tokens, max_model_len, generates=generates)
    if request.uses_grammar and not has_grammars:
        raise NotImplementedFeatureError(
            "Structured outputs are not supported by this engine.", "structured_outputs"
        )
    if request.mm_features and not is_encoder_decoder:
        check_media(request)
    largest = max(request.media_embeds, default=0)
    if largest > media_room:
        raise ValidationError(
            f"A media item takes {largest} embeddings; at most {media_room} fit the encoder's step "
            "and cache.",
            "mm_features",
            largest,
        )
    if whole_items_up_to is not None:
        longest = max((f.mm_position.length for f in request.mm_features), default=0)
        if longest > whole_items_up_to:
            raise ValidationError(
                f"A media item takes {longest} positions; at most {whole_items_up_to} fit a step, "
                "and this model computes an item in one.",
                "mm_features",
                longest,
            )
