"""How is the interface described to programs?"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from jubako.entrypoints.server.errors import ErrorResponse
from jubako.entrypoints.server.messages_protocol import (
    MessagesRequest,
    MessagesResponse,
    MessagesToCount,
    TokenCount,
)
from jubako.entrypoints.server.pooling_protocol import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from jubako.entrypoints.server.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from jubako.entrypoints.server.responses_protocol import (
    ResponseObject,
    ResponsesRequest,
)
from jubako.entrypoints.server.transcription_form import Format
from jubako.entrypoints.server.transcription_formats import TranscriptionResponse

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "temperature": {"type": "number"},
        "response_format": {"enum": list(get_args(Format))},
        "timestamp_granularities[]": {"type": "array", "items": {"enum": ["segment"]}},
        "stream": {"type": "boolean"},
    },
}
"""What the paths for speech take."""

_BODIES: dict[str, tuple[type | None, type]] = {
    "/v1/completions": (CompletionRequest, CompletionResponse),
    "/v1/chat/completions": (ChatCompletionRequest, ChatCompletionResponse),
    "/v1/responses": (ResponsesRequest, ResponseObject),
    "/v1/responses/{response_id}": (None, ResponseObject),
    "/v1/responses/{response_id}/cancel": (None, ResponseObject),
    "/v1/messages": (MessagesRequest, MessagesResponse),
    "/v1/messages/count_tokens": (MessagesToCount, TokenCount),
    "/v1/models": (None, ModelList),
    "/v1/models/{model}": (None, ModelCard),
    "/v1/embeddings": (EmbeddingRequest, EmbeddingResponse),
    "/pooling": (PoolingRequest, PoolingResponse),
    "/classify": (ClassificationRequest, ClassificationResponse),
    "/score": (ScoreRequest, ScoreResponse),
    "/v1/score": (ScoreRequest, ScoreResponse),
    "/rerank": (RerankRequest, RerankResponse),
    "/v1/rerank": (RerankRequest, RerankResponse),
    "/v2/rerank": (RerankRequest, RerankResponse),
    "/v1/audio/transcriptions": (None, TranscriptionResponse),
    "/v1/audio/translations": (None, TranscriptionResponse),
    "/tokenize": (TokenizeRequest, TokenizeResponse),
    "/detokenize": (DetokenizeRequest, DetokenizeResponse),
}
"""Path → records of the request's body and of the answer."""

_FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_STREAMS = _FORMS | {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the schemas of the records that are really read and written."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    records = [r for pair in _BODIES.values() for r in pair if r is not None] + [ErrorResponse]
    schemas, components = msgspec.json.schema_components(
        records, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(records, schemas))
    document["components"] = {
        "schemas": components,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{"key": []}, {}]
    for path, methods in document["paths"].items():
        request, answer = _BODIES.get(path, (None, None))
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = _content("An error", schema_of[ErrorResponse])
            if answer is not None:
                responses["200"] = _content("The answer", schema_of[answer])
            if path in _STREAMS:
                responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
            if path in _FORMS:
                operation["requestBody"] = {
                    "required": True,
                    "content": {"multipart/form-data": {"schema": _FORM}},
                }
            if request is not None:
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema_of[request]}},
                }
    app.openapi_schema = document
    return document


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
