"""What does a user get back for a request?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    import numpy as np


class Logprob(NamedTuple):
    """Log-probability of one token at one position.

    `logprob` is natural, from the unmodified logits; `rank` counts from 1, the most likely token.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id → logprob at one position: the chosen token first, then the best ones by rank."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the `n` answers to a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort", "error", or None while it is being written."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence and length."""
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


class RequestStateStats(msgspec.Struct, kw_only=True):
    """When what happened to a request. Times in seconds.

    `arrival_time` is wall clock; all others are the monotonic clock of the engine, and 0 until the
    event has happened.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """From arrival to the first token, measured in the front end."""
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    is_corrupted: bool = False


class RequestOutput(msgspec.Struct, kw_only=True):
    """The state of a request, as its output kind asks: all so far, only what is new, or the end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry a prompt token; the first is None."""
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found instead of computed, when the request first ran."""
    multi_modal_placeholders: dict[str, list[Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class PoolingOutput(msgspec.Struct, kw_only=True):
    """What a pooling model made of a prompt."""

    data: np.ndarray[Any, Any]
    """float32: [size] of a task on the whole prompt, [tokens, size] of one by token."""

    @classmethod
    def of(cls, output: PoolingOutput) -> PoolingOutput:
        """The data as it is."""
        return output


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """A prompt as a vector."""

    embedding: list[float]

    @classmethod
    def of(cls, output: PoolingOutput) -> EmbeddingOutput:
        """The view of a pooled vector."""
        return cls(embedding=output.data.tolist())

    @property
    def hidden_size(self) -> int:
        """Dimensions of the vector."""
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, kw_only=True):
    """A prompt's score for every label; probabilities, unless the model says otherwise."""

    probs: list[float]

    @classmethod
    def of(cls, output: PoolingOutput) -> ClassificationOutput:
        """The view of pooled scores."""
        return cls(probs=output.data.tolist())

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


class ScoringOutput(msgspec.Struct, kw_only=True):
    """How well two texts fit each other."""

    score: float

    @classmethod
    def of(cls, output: PoolingOutput) -> ScoringOutput:
        """The view of the one score of a cross encoder."""
        return cls(score=float(output.data.reshape(-1)[0]))


View = TypeVar("View", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


class PoolingRequestOutput(msgspec.Struct, Generic[View], kw_only=True):
    """The result of a pooling request; there is one, at its end."""

    request_id: str
    outputs: View | None
    """None if the request did not come to its end."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    finish_reason: str = "stop"
    """"stop", "abort" or "error"."""
    error: str | None = None
    """What went wrong, if something did."""
    metrics: RequestStateStats | None = None


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def viewed(
    output: PoolingRequestOutput[PoolingOutput], view: type[View]
) -> PoolingRequestOutput[View]:
    """`output` with its data as `view` shows it."""
    data = None if output.outputs is None else view.of(output.outputs)
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=data,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        finished=output.finished,
        finish_reason=output.finish_reason,
        error=output.error,
        metrics=output.metrics,
    )


class TranscriptionSegment(msgspec.Struct, kw_only=True):
    """What was said from `start` to `end`, in seconds of the recording."""

    start: float
    end: float
    text: str
    token_ids: list[int]
    """Of the text alone."""
    avg_logprob: float | None = None
    """Mean log-probability of the tokens; only with timestamps."""


class Transcription(msgspec.Struct, kw_only=True):
    """What was said in a recording."""

    text: str
    language: str
    """Code of the language that was spoken, "en"."""
    task: str
    """"transcribe", or "translate" for text in English whatever was spoken."""
    duration: float
    """Seconds of the recording."""
    segments: list[TranscriptionSegment]
    """With timestamps as the model hears them, else one for each piece of at most 30 seconds."""
