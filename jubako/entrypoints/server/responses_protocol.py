"""Which fields does OpenAI's interface for responses take, and which does it answer with?"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jubako.entrypoints.server.protocol import Int, Neutral

# -- requests ---------------------------------------------------------------------------------


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses. `input` is a text or a list of items."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    cache_salt: str | None = None
    priority: Int | None = None


RESPONSES_NOT_BUILT: dict[type, dict[str, Neutral]] = {
    ResponsesRequest: {
        "conversation": (),
        "context_management": ([],),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "stream_options": ({},),
        "top_logprobs": (0,),
    }
}
"""Request type → field → values, besides null, that ask for nothing."""

# -- answers ----------------------------------------------------------------------------------

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    """Text for the user."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    """What the model thought."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag="message"):
    """The model says something."""

    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """The model thinks; there is no summary beside the whole of it."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call that the model wants made."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Not counted apart: thoughts are part of `output_tokens`."""

    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer of /v1/responses; what was asked for stands in it too."""

    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str
    usage: ResponsesUsage | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


# -- events of a stream -----------------------------------------------------------------------


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event; which of the fields it has depends on its type."""

    type: str
    sequence_number: int | None = None
    response: ResponseObject | None = None
    output_index: int | None = None
    item: Item | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
