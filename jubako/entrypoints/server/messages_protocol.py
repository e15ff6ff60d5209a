"""Which fields does Anthropic's interface for messages take, and which does it answer with?"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jubako.entrypoints.server.protocol import Int, Neutral

# -- requests ---------------------------------------------------------------------------------


class MessagesToCount(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens. A content is a text or a list of blocks."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(MessagesToCount):
    """POST /v1/messages."""

    max_tokens: Int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None


_NEUTRAL: dict[str, Neutral] = {"mcp_servers": ([],), "container": (), "context_management": ()}

MESSAGES_NOT_BUILT: dict[type, dict[str, Neutral]] = {
    MessagesToCount: _NEUTRAL,
    MessagesRequest: {**_NEUTRAL, "service_tier": ("auto", "standard_only"), "inference_geo": ()},
}
"""Request type → field → values, besides null, that ask for nothing."""

# -- answers ----------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Text for the user."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """What the model thought; nothing is signed here."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call that the model wants made."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Tokens of a request; those from the prefix cache are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesResponse(msgspec.Struct, kw_only=True):
    """The answer of /v1/messages."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(msgspec.Struct, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


# -- events of a stream -----------------------------------------------------------------------


class MessageStart(msgspec.Struct, kw_only=True, tag="message_start"):
    """The message without content."""

    message: MessagesResponse


class ContentBlockStart(msgspec.Struct, kw_only=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, kw_only=True, tag="text_delta"):
    """More of a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag="thinking_delta"):
    """More of a thinking block."""

    thinking: str


class InputJSONDelta(msgspec.Struct, kw_only=True, tag="input_json_delta"):
    """More of the JSON of a call's input."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, kw_only=True, tag="content_block_delta"):
    """What is new of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJSONDelta


class ContentBlockStop(msgspec.Struct, kw_only=True, tag="content_block_stop"):
    """A block has ended."""

    index: int


class StopDelta(msgspec.Struct, kw_only=True):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, kw_only=True, tag="message_delta"):
    """The end of the message, and what it took."""

    delta: StopDelta
    usage: MessagesUsage | UnsetType = UNSET


class MessageStop(msgspec.Struct, kw_only=True, tag="message_stop"):
    """The last event."""
