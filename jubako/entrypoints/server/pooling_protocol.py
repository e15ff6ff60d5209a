"""Which fields do the endpoints for vectors and scores take, and which do they answer with?

`/v1/embeddings` is OpenAI's; `/score`, `/classify` and `/pooling` are vLLM's; `/rerank` has the
fields that Jina's and Cohere's have in common. As in `protocol`, null is unset.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jubako.entrypoints.server.protocol import Int, Neutral

# -- requests ---------------------------------------------------------------------------------


class PoolingBase(msgspec.Struct, kw_only=True):
    """What all of them have in common."""

    model: str | None = None
    truncate_prompt_tokens: Int | None = None
    add_special_tokens: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None


class EmbeddingRequest(PoolingBase):
    """POST /v1/embeddings. `input` is a text, a list of token ids, or a list of either."""

    input: Any = None
    dimensions: Int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    use_activation: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """POST /pooling: any task of the model, by token where none is named."""

    task: str | None = None


class ClassificationRequest(PoolingBase):
    """POST /classify."""

    input: Any = None
    use_activation: bool | None = None


class ScoreRequest(PoolingBase):
    """POST /score: one text with each of many, or each with its own.

    The texts are `queries` and `documents`, or by their older names `text_1` and `text_2`.
    """

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    use_activation: bool | None = None


class RerankRequest(PoolingBase):
    """POST /rerank. A document is a text, or an object with one."""

    query: str | None = None
    documents: list[str | dict[str, Any]] | None = None
    top_n: Int | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


_NOT_BUILT: dict[str, Neutral] = {
    "messages": ([],),
    "mm_processor_kwargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}

POOLING_NOT_BUILT: dict[type, dict[str, Neutral]] = {
    EmbeddingRequest: _NOT_BUILT,
    PoolingRequest: _NOT_BUILT,
    ClassificationRequest: _NOT_BUILT,
    ScoreRequest: _NOT_BUILT,
    RerankRequest: {**_NOT_BUILT, "max_chunks_per_doc": (), "max_tokens_per_doc": ()},
}
"""As `protocol.NOT_BUILT`."""

# -- responses --------------------------------------------------------------------------------


class PoolingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """A vector: numbers, or base64 of little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """The answer of /v1/embeddings."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class Pooled(msgspec.Struct, kw_only=True):
    """Numbers of a prompt, or of each of its tokens; or base64 of them all, token after token."""

    object: str = "pooling"
    index: int
    data: list[Any] | str


class PoolingResponse(msgspec.Struct, kw_only=True):
    """The answer of /pooling."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class Classification(msgspec.Struct, kw_only=True):
    """The labels' scores of one prompt; `label` is the one with the highest."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(msgspec.Struct, kw_only=True):
    """The answer of /classify."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    """How well a pair fits."""

    object: str = "score"
    index: int
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    """The answer of /score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankDocument(msgspec.Struct, kw_only=True):
    """A document as it came."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    """A document's place in the request, and how well it fits the query."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    """The answer of /rerank, the best document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
