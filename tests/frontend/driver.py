"""Plays the core for the front end: answers chosen token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jubako.engine.messages import (
    EngineCoreOutput,
    EngineCoreReady,
    EngineCoreRequest,
    FinishReason,
)
from jubako.frontend.tokenizer import Tokenizer
from jubako.sampling_params import SamplingParams
from tests.engine import fakes
from tests.engine.fakes import as_logprobs, logprob_row

BYTE = 3
"""The id of byte 0."""

tokenizer = Tokenizer(
    fakes.byte_tokenizer(), special_tokens={"eos_token": "<eos>", "bos_token": "<bos>"}
)

ready = EngineCoreReady(
    version="0",
    model="fake",
    architecture="Fake",
    dtype="float32",
    device="cpu",
    max_model_len=fakes.MAX_MODEL_LEN,
    vocab_size=fakes.VOCAB_SIZE,
    block_sizes=[4],
    num_gpu_blocks=100,
    kv_cache_tokens=400,
    enable_prefix_caching=True,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def ids_of(text: str) -> list[int]:
    return [BYTE + b for b in text.encode()]


def request(
    request_id: str = "r", prompt: Sequence[int] = (), external: str | None = None, **options: Any
) -> EngineCoreRequest:
    options.setdefault("max_tokens", 1000)
    return EngineCoreRequest(
        request_id,
        list(prompt) or ids_of("prompt"),
        None,
        SamplingParams(**options),
        None,
        fakes.EOS,
        1.0,
        external_req_id=external,
    )


def outputs(
    request_id: str,
    answer: Sequence[int],
    sizes: Sequence[int] = (),
    reason: FinishReason | None = FinishReason.LENGTH,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
    prompt: Sequence[int] = (),
) -> list[EngineCoreOutput]:
    """The core's outputs that bring `answer`, in pieces of `sizes` tokens, then one by one."""
    pieces: list[list[int]] = []
    rest = list(answer)
    for size in [*sizes, *[1] * len(rest)]:
        if rest:
            pieces.append(rest[:size])
            rest = rest[size:]
    made = [EngineCoreOutput(request_id, piece) for piece in pieces]
    if num_logprobs is not None:
        for output in made:
            rows = [logprob_row(t, num_logprobs) for t in output.new_token_ids]
            output.new_logprobs = as_logprobs(rows)
    if num_prompt_logprobs is not None:
        rows = [logprob_row(t, num_prompt_logprobs) for t in prompt[1:]]
        made[0].new_prompt_logprobs_tensors = as_logprobs(rows)
    made[-1].finish_reason = reason
    return made
