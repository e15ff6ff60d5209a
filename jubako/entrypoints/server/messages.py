"""How is /v1/messages answered?

Anthropic's interface, documented at https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from jubako.entrypoints.server.chat_turn import ChatTurn, Part
from jubako.entrypoints.server.errors import messages_error_body
from jubako.entrypoints.server.exchange import StreamStyle
from jubako.entrypoints.server.generation import Generation, event
from jubako.entrypoints.server.messages_input import as_chat
from jubako.entrypoints.server.messages_protocol import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJSONDelta,
    MessageDelta,
    MessagesRequest,
    MessagesResponse,
    MessageStart,
    MessagesToCount,
    MessageStop,
    MessagesUsage,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
)
from jubako.entrypoints.server.state import ServerState
from jubako.entrypoints.server.tools import new_call_id
from jubako.frontend.answers.events import Arguments, Call, Content, Event, Reasoning
from jubako.frontend.answers.parser import ParsedAnswer

_REASONS: dict[str | None, StopReason] = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def _error_event(error: BaseException) -> bytes:
    return b"event: error\ndata: " + messages_error_body(error) + b"\n\n"


async def count_tokens(state: ServerState, request: MessagesToCount) -> TokenCount:
    """How many tokens the prompt of `request` has."""
    turn = ChatTurn(state, as_chat(request), "")
    return TokenCount(input_tokens=len((await turn.prepare()).prompts[0]))


class MessagesExchange:
    """One request to /v1/messages, from its record to its answer or the events of its stream."""

    stream_style = StreamStyle(last=b"", error=_error_event)

    def __init__(self, state: ServerState, request: MessagesRequest, request_id: str) -> None:
        self._state = state
        self.id = f"msg_{request_id}"
        self._turn = ChatTurn(state, as_chat(request), self.id)

    async def prepare(self) -> Generation:
        """Check the request, apply the chat template and tokenise."""
        self._generation = await self._turn.prepare()
        return self._generation

    def admit(self) -> Callable[[], None]:
        """Take places for its answer; the result gives them back."""
        return self._generation.admit("messages")

    def _message(self, content: list[Block], output_tokens: int) -> MessagesResponse:
        return MessagesResponse(
            id=self.id,
            model=self._state.model_name,
            content=content,
            usage=self._usage(output_tokens),
        )

    def _usage(self, output_tokens: int) -> MessagesUsage:
        usage = self._generation.usage(output_tokens)
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=output_tokens,
            cache_read_input_tokens=cached,
        )

    def _end(self, part: Part) -> StopDelta:
        stopped_by = part.completion.stop_reason
        if part.finish_reason == "stop" and isinstance(stopped_by, str):
            return StopDelta(stop_reason="stop_sequence", stop_sequence=stopped_by)
        # A call that was demanded by name ends with "stop" in OpenAI's terms.
        reason = "tool_calls" if part.called and part.finish_reason == "stop" else None
        return StopDelta(stop_reason=_REASONS.get(reason or part.finish_reason, "end_turn"))

    async def answer(self) -> MessagesResponse:
        """The whole answer at once."""
        async with aclosing(self._turn.parts()) as parts:
            part = await anext(parts)
        found = ParsedAnswer()
        found.add(part.events)
        content: list[Block] = []
        if found.reasoning:
            content.append(ThinkingBlock(thinking=found.reasoning))
        if found.content:
            content.append(TextBlock(text=found.content))
        for call in found.calls:
            block = ToolUseBlock(id=self._call_id(), name=call.name, input=_input(call.arguments))
            content.append(block)
        message = self._message(content, len(part.completion.token_ids))
        end = self._end(part)
        message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
        return message

    def _call_id(self) -> str:
        return new_call_id(self._state.model_style)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of named events."""
        blocks = _Blocks(self._call_id)
        tokens = 0
        began = False
        async with aclosing(self._turn.parts()) as parts:
            async for part in parts:
                records: list[msgspec.Struct] = []
                if not began:
                    began = True
                    records.append(MessageStart(message=self._message([], 0)))
                tokens += len(part.completion.token_ids)
                for found in part.events:
                    records += blocks.add(found)
                if part.finish_reason is not None:
                    records += blocks.end()
                    records.append(MessageDelta(delta=self._end(part), usage=self._usage(tokens)))
                    records.append(MessageStop())
                if records:
                    yield b"".join(map(_named, records))


class _Blocks:
    """Turns what is found in an answer into blocks that begin, grow and end."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._kind: type | None = None
        self._index = -1

    def add(self, found: Event) -> list[msgspec.Struct]:
        """The events for what was found next."""
        match found:
            case Content(text):
                return [*self._open(TextBlock(text="")), self._more(TextDelta(text=text))]
            case Reasoning(text):
                opened = self._open(ThinkingBlock(thinking=""))
                return [*opened, self._more(ThinkingDelta(thinking=text))]
            case Call(name):
                return self._open(ToolUseBlock(id=self._new_id(), name=name, input={}), new=True)
            case Arguments(text):
                return [self._more(InputJSONDelta(partial_json=text))]

    def _open(self, block: Block, new: bool = False) -> list[msgspec.Struct]:
        if type(block) is self._kind and not new:
            return []
        ended = self.end()
        self._kind = type(block)
        self._index += 1
        return [*ended, ContentBlockStart(index=self._index, content_block=block)]

    def _more(self, delta: TextDelta | ThinkingDelta | InputJSONDelta) -> ContentBlockDelta:
        return ContentBlockDelta(index=self._index, delta=delta)

    def end(self) -> list[msgspec.Struct]:
        """The end of the block that is open, if one is."""
        if self._kind is None:
            return []
        self._kind = None
        return [ContentBlockStop(index=self._index)]


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; what a model wrote otherwise stands in one field."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _named(record: msgspec.Struct) -> bytes:
    return event(record, str(record.__struct_config__.tag))
