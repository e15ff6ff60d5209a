"""Which paths does the server have, and who answers them?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar, cast

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jubako import __version__
from jubako.entrypoints.server.chat import ChatExchange
from jubako.entrypoints.server.completions import CompletionExchange
from jubako.entrypoints.server.decoding import check_media_type, decode, read_body
from jubako.entrypoints.server.errors import ServerError, error_response
from jubako.entrypoints.server.exchange import (
    ClientLeft,
    Events,
    EventStream,
    StreamStyle,
    until_disconnect,
)
from jubako.entrypoints.server.gate import Gate, request_id_of
from jubako.entrypoints.server.generation import check_model
from jubako.entrypoints.server.http_metrics import HTTPMetrics
from jubako.entrypoints.server.messages import MessagesExchange, count_tokens
from jubako.entrypoints.server.messages_protocol import MessagesRequest, MessagesToCount
from jubako.entrypoints.server.openapi import openapi_document
from jubako.entrypoints.server.pooling import (
    AnyPoolingExchange,
    ClassificationExchange,
    EmbeddingExchange,
)
from jubako.entrypoints.server.pooling_protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jubako.entrypoints.server.prompts import encode, normalise_messages, render_chat
from jubako.entrypoints.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from jubako.entrypoints.server.response_store import ResponseStore
from jubako.entrypoints.server.responses import ResponsesExchange, cancel
from jubako.entrypoints.server.responses_protocol import DeletedResponse, ResponsesRequest
from jubako.entrypoints.server.scoring import RerankExchange, ScoreExchange
from jubako.entrypoints.server.state import ServerState
from jubako.entrypoints.server.tools import checked_tools
from jubako.entrypoints.server.transcription import TranscriptionExchange
from jubako.entrypoints.server.transcription_form import read_form
from jubako.errors import JubakoError, ValidationError

logger = logging.getLogger(__name__)

Record = TypeVar("Record", bound=msgspec.Struct)

WARNING_HEADER = "X-Jubako-Warning"

CLIENT_CLOSED_REQUEST = 499
"""Status, never seen by anybody, of an exchange whose client left."""


def build_app(state: ServerState, registry: CollectorRegistry) -> ASGIApp:
    """The ASGI application; `/metrics` shows `registry`."""
    app = FastAPI(
        title="Jubako",
        version=__version__,
        exception_handlers={
            JubakoError: _on_error,
            HTTPException: _on_error,
            ClientLeft: _on_client_left,
            ClientDisconnect: _on_client_left,
            Exception: _on_error,
        },
        redirect_slashes=False,
        redoc_url=None,
    )
    if state.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[WARNING_HEADER, "X-Request-Id", "Retry-After"],
        )
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    _add_generation(app, state)
    _add_pooling(app, state)
    _add_transcription(app, state)
    _add_models(app, state)
    _add_tokenizer(app, state)
    _add_housekeeping(app, state, registry)
    if state.config.dev_mode:
        _add_development(app, state)
    return Gate(app, state, HTTPMetrics(registry))


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def json_response(record: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    """A successful answer."""
    return Response(
        msgspec.json.encode(record), headers=headers or {}, media_type="application/json"
    )


async def _read(
    state: ServerState, request: Request, record: type[Record]
) -> tuple[Record, dict[str, str]]:
    """The request record in the body, and headers that tell of fields that were ignored."""
    check_media_type(request)
    body = await read_body(request, state, state.config.max_body_bytes)
    value, unknown = decode(body, record)
    return value, _warning(unknown)


def _warning(unknown: Sequence[str]) -> dict[str, str]:
    """Headers that tell of fields that were ignored."""
    if not unknown:
        return {}
    # Names come from the client: keep only what may stand in a header.
    names = ", ".join(name for name in unknown[:20] if name.isidentifier() and name.isascii())
    logger.debug("Unknown fields in a request were ignored: %s", names)
    return {WARNING_HEADER: f"unknown fields were ignored: {names[:500]}"}


class Exchange(Protocol):
    """One request on its way: prepared, admitted, then answered whole."""

    async def prepare(self) -> object:
        """Check the request and make it ready; raises what is wrong with it."""

    def admit(self) -> Callable[[], None]:
        """Take its places in the server; the result gives them back."""

    async def answer(self) -> msgspec.Struct | Response:
        """The whole answer at once."""


class StreamingExchange(Exchange, Protocol):
    """An exchange that can also be answered as a stream of events."""

    stream_style: StreamStyle

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""


async def _conduct(
    request: Request, exchange: Exchange, stream: bool, headers: dict[str, str]
) -> Response:
    """Take a request from its record to its answer, or to the stream that gives it."""
    await until_disconnect(request.receive, exchange.prepare())
    release = exchange.admit()
    streaming = False
    try:
        if not stream:
            answer = await until_disconnect(request.receive, exchange.answer())
            if isinstance(answer, Response):
                answer.headers.update(headers)
                return answer
            return json_response(answer, headers)
        streamed = cast(StreamingExchange, exchange)
        events = Events(streamed.events())
        await until_disconnect(request.receive, events.start())
        streaming = True
        return EventStream(events, release, headers, streamed.stream_style)
    finally:
        if not streaming:
            release()


# -- generation -------------------------------------------------------------------------------


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        record, headers = await _read(state, request, CompletionRequest)
        exchange = CompletionExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, bool(record.stream), headers)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        record, headers = await _read(state, request, ChatCompletionRequest)
        exchange = ChatExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, bool(record.stream), headers)

    responses = ResponseStore()

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        record, headers = await _read(state, request, ResponsesRequest)
        exchange = ResponsesExchange(state, responses, record, request_id_of(request))
        return await _conduct(request, exchange, bool(record.stream), headers)

    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(response_id: str) -> Response:
        return json_response(responses.get(response_id).response)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        responses.delete(response_id)
        return json_response(DeletedResponse(id=response_id))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str) -> Response:
        return json_response(await cancel(responses, response_id))

    @app.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        record, headers = await _read(state, request, MessagesRequest)
        exchange = MessagesExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, bool(record.stream), headers)

    @app.post("/v1/messages/count_tokens")
    async def count_message_tokens(request: Request) -> Response:
        record, headers = await _read(state, request, MessagesToCount)
        count = await until_disconnect(request.receive, count_tokens(state, record))
        return json_response(count, headers)


# -- vectors and scores -----------------------------------------------------------------------


def _add_pooling(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/embeddings")
    async def create_embedding(request: Request) -> Response:
        record, headers = await _read(state, request, EmbeddingRequest)
        exchange = EmbeddingExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, False, headers)

    @app.post("/pooling")
    async def pooling(request: Request) -> Response:
        record, headers = await _read(state, request, PoolingRequest)
        exchange = AnyPoolingExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, False, headers)

    @app.post("/classify")
    async def classify(request: Request) -> Response:
        record, headers = await _read(state, request, ClassificationRequest)
        exchange = ClassificationExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, False, headers)

    @app.post("/v1/score", operation_id="score_v1")
    @app.post("/score", operation_id="score")
    async def score(request: Request) -> Response:
        record, headers = await _read(state, request, ScoreRequest)
        exchange = ScoreExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, False, headers)

    @app.post("/v2/rerank", operation_id="rerank_v2")
    @app.post("/v1/rerank", operation_id="rerank_v1")
    @app.post("/rerank", operation_id="rerank")
    async def rerank(request: Request) -> Response:
        record, headers = await _read(state, request, RerankRequest)
        exchange = RerankExchange(state, record, request_id_of(request))
        return await _conduct(request, exchange, False, headers)


# -- speech -----------------------------------------------------------------------------------


def _add_transcription(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/audio/transcriptions")
    async def create_transcription(request: Request) -> Response:
        return await _transcribe(state, request, "transcribe")

    @app.post("/v1/audio/translations")
    async def create_translation(request: Request) -> Response:
        return await _transcribe(state, request, "translate")


async def _transcribe(state: ServerState, request: Request, task: str) -> Response:
    form = await read_form(state, request)
    headers = _warning(form.unknown)
    if form.language is None:
        told = [*headers.values(), "no language was given, the recording is taken to be English"]
        headers = {WARNING_HEADER: "; ".join(told)}
    exchange = TranscriptionExchange(state, form, task, request_id_of(request))
    return await _conduct(request, exchange, form.stream, headers)


# -- models -----------------------------------------------------------------------------------


def _add_models(app: FastAPI, state: ServerState) -> None:
    def card() -> ModelCard:
        return ModelCard(
            id=state.model_name, created=state.created, max_model_len=state.max_model_len
        )

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(ModelList(data=[card()]))

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        answer = card()
        check_model(state, model)
        return json_response(answer)


# -- tokeniser --------------------------------------------------------------------------------


def _add_tokenizer(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        record, headers = await _read(state, request, TokenizeRequest)
        check_model(state, record.model)
        if (record.prompt is None) == (record.messages is None):
            raise ValidationError("Exactly one of prompt and messages is required.", "prompt")
        if record.prompt is not None:
            add_special = record.add_special_tokens is not False
            ids = await encode(state, record.prompt, add_special, "prompt", truncated=True)
        else:
            messages = normalise_messages(record.messages)
            tools = checked_tools(record.tools) if record.tools else None
            text = await render_chat(state, record, messages, tools)
            ids = await encode(state, text, bool(record.add_special_tokens), "messages")
        answer = TokenizeResponse(count=len(ids), max_model_len=state.max_model_len, tokens=ids)
        if record.return_token_strs:
            tokenizer = state.engine.tokenizer
            answer.token_strs = [tokenizer.id_to_token(token) or "" for token in ids]
        return json_response(answer, headers)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        record, headers = await _read(state, request, DetokenizeRequest)
        check_model(state, record.model)
        if record.tokens is None:
            raise ValidationError("tokens is required.", "tokens")
        tokenizer = state.engine.tokenizer
        for token in (min(record.tokens, default=0), max(record.tokens, default=0)):
            if not 0 <= token <= tokenizer.max_token_id:
                raise ValidationError(
                    f"tokens[{record.tokens.index(token)}]={token} is not a token id; they go from "
                    f"0 to {tokenizer.max_token_id}.",
                    "tokens",
                    token,
                )
        text = await asyncio.to_thread(tokenizer.decode, record.tokens, skip_special_tokens=False)
        return json_response(DetokenizeResponse(prompt=text), headers)


# -- housekeeping -----------------------------------------------------------------------------


def _add_housekeeping(app: FastAPI, state: ServerState, registry: CollectorRegistry) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine's loop answers; 503 before it has started and once it is dead."""
        await state.engine.check_health()
        return Response()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """200 while new requests are welcome: the model is loaded and the server not draining."""
        assert state.engine is not None
        state.check_accepting()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


# -- development ------------------------------------------------------------------------------


def _add_development(app: FastAPI, state: ServerState) -> None:
    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forget all KV that is kept for re-use; refused while requests hold some of it."""
        if not await state.engine.reset_prefix_cache():
            raise ServerError("rate_limit_exceeded", "Requests are using the cache; try again.")
        return Response()
