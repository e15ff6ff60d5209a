"""A model whose every token depends on all tokens before it, and on what else belongs to them.

The KV of a token is a number that stands for the whole prefix up to it: tokens, adapter, salt and
media. So whoever reads a slot can tell at once whether it holds what it would have computed itself,
and a wrong slot changes every token after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from jubako.kv_cache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from jubako.scheduler import FinishReason, Request

EOS = 1
VOCAB = 11
MODULUS = 2**61 - 1


def mix(state: int, value: int) -> int:
    """The state after `value`."""
    return (state * 1_000_003 + value * 7919 + 11) % MODULUS


@dataclass
class Context:
    """What beside its tokens decides a request's KV."""

    start: int = 17
    media: dict[int, int] = field(default_factory=dict)
    """By position, a number for the embedding that stands there."""

    @classmethod
    def of(cls, request: Request) -> Context:
        start = 17
        if request.lora_request is not None:
            start = mix(start, request.lora_request.lora_int_id)
        if request.cache_salt is not None:
            start = mix(start, crc32(request.cache_salt.encode()))
        media = {}
        for feature in request.mm_features:
            place = feature.mm_position
            number = crc32(feature.identifier.encode())
            for i in range(place.length):
                if place.is_embed is None or place.is_embed[i]:
                    media[place.offset + i] = mix(number, i)
        return cls(start, media)


PLAIN = Context()


class Prefixes:
    """For each position of a text, the number that stands for all of it up to there."""

    def __init__(self, context: Context = PLAIN) -> None:
        self.context = context
        self.tokens: list[int] = []
        self.numbers: list[int] = []

    def of(self, tokens: Sequence[int]) -> list[int]:
        """One number a position. Extending the text of the last call costs only what is new."""
        mine, numbers = self.tokens, self.numbers
        common = min(len(mine), len(tokens))
        if mine[:common] != tokens[:common]:
            common = next(i for i in range(common) if mine[i] != tokens[i])
        del mine[common:], numbers[common:]
        state = numbers[-1] if numbers else self.context.start
        for position in range(common, len(tokens)):
            embedding = self.context.media.get(position)
            state = mix(state, tokens[position] if embedding is None else embedding)
            mine.append(tokens[position])
            numbers.append(state)
        return numbers

    def spoil(self, error: int) -> None:
        """From now on everything comes out wrong."""
        self.context.start += error
        self.tokens.clear()
        self.numbers.clear()

    def state_after(self, count: int) -> int:
        """What a recurrent layer knows after `count` tokens of the text."""
        return mix(self.numbers[count - 1], 3) if count else 0


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """The numbers of a text without media, adapter and salt."""
    return list(Prefixes().of(tokens))


def choose(state: int, allowed: int | None = None) -> int:
    """The token that follows a prefix; `allowed` is a bit mask of tokens."""
    token = (state >> 7) % VOCAB
    if allowed is not None:
        while not allowed >> token & 1:
            token = (token + 1) % VOCAB
    return token


def next_token(tokens: Sequence[int]) -> int:
    """What follows `tokens`, when nothing else belongs to them."""
    return choose(prefix_hashes(tokens)[-1])


def first_read(spec: KVCacheSpec, position: int) -> int:
    """The first token that the token at `position` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size * spec.attention_chunk_size
    assert isinstance(spec, FullAttentionSpec)
    return 0


# -- structured output --------------------------------------------------------------------------


def allowed_tokens(num_output_tokens: int) -> int:
    """The grammar of all requests that have one: even and odd tokens in turn, or the end."""
    return sum(1 << t for t in range(VOCAB) if t == EOS or (t + num_output_tokens) % 2 == 0)


# -- answers ------------------------------------------------------------------------------------


@dataclass
class Answer:
    tokens: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    pooled: int | None = None


def answer(
    request: Request,
    max_model_len: int,
    *,
    prompt: Sequence[int] | None = None,
    masked: bool = False,
) -> Answer:
    """What `request` must be answered, whatever else runs: the model alone, token by token.

    `prompt` replaces the request's own; `masked`: its grammar is obeyed.
    """
    tokens = list(request.prompt_token_ids or () if prompt is None else prompt)
    prefixes = Prefixes(Context.of(request))
    params = request.sampling_params
    if params is None:
        return Answer([], FinishReason.STOP, None, prefixes.of(tokens)[-1])
    output: list[int] = []
    while True:
        allowed = allowed_tokens(len(output)) if masked and request.uses_grammar else None
        token = choose(prefixes.of(tokens)[-1], allowed)
        tokens.append(token)
        output.append(token)
        if len(output) >= params.min_tokens:
            if token == request.eos_token_id and not params.ignore_eos:
                return Answer(output, FinishReason.STOP, None)
            if token in params.stop_ids:
                return Answer(output, FinishReason.STOP, token)
        if len(tokens) >= max_model_len or len(output) == params.max_tokens:
            return Answer(output, FinishReason.LENGTH, None)
