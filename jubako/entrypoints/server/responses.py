"""How is /v1/responses answered?

OpenAI's interface, documented at https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from jubako.entrypoints.server.chat_turn import ChatTurn, Part
from jubako.entrypoints.server.errors import ServerError, error_info
from jubako.entrypoints.server.exchange import StreamStyle
from jubako.entrypoints.server.generation import event
from jubako.entrypoints.server.response_store import ResponseStore, StoredResponse
from jubako.entrypoints.server.responses_input import as_chat, input_messages, output_messages
from jubako.entrypoints.server.responses_items import OutputItems
from jubako.entrypoints.server.responses_protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
)
from jubako.entrypoints.server.state import ServerState
from jubako.entrypoints.server.tools import new_call_id
from jubako.errors import ValidationError


def _error_event(error: BaseException) -> bytes:
    info = error_info(error)
    return _event(
        ResponseEvent(type="error", code=info.code, message=info.message, param=info.param)
    )


def _event(record: ResponseEvent) -> bytes:
    return event(record, record.type)


class ResponsesExchange:
    """One request to /v1/responses, from its record to its answer or the events of its stream."""

    stream_style = StreamStyle(last=b"", error=_error_event)

    def __init__(
        self,
        state: ServerState,
        store: ResponseStore,
        request: ResponsesRequest,
        request_id: str,
    ) -> None:
        self._state = state
        self._store = store
        self._request = request
        self.id = f"resp_{request_id}"
        if request.background and request.store is False:
            raise ValidationError("background needs store; leave out store=false.", "store")
        if request.background and request.stream:
            raise ValidationError(
                "background and stream exclude each other; ask for the response by its id.",
                "stream",
            )
        earlier: list[dict[str, Any]] = []
        if request.previous_response_id is not None:
            previous = store.get(request.previous_response_id)
            if previous.response.status not in ("completed", "incomplete"):
                raise ValidationError(
                    f"previous_response_id is {previous.response.status}; wait until it is "
                    "completed.",
                    "previous_response_id",
                )
            earlier = previous.messages
        self._messages = [*earlier, *input_messages(request)]
        self._turn = ChatTurn(state, as_chat(request, earlier), self.id)
        self._items = OutputItems(lambda: new_call_id(state.model_style))
        self._response = self._begin()

    def _begin(self) -> ResponseObject:
        request = self._request
        several = request.parallel_tool_calls is not False
        return ResponseObject(
            id=self.id,
            created_at=int(time.time()),
            status="in_progress",
            background=bool(request.background),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=self._state.model_name,
            output=self._items.items,
            parallel_tool_calls=several,
            previous_response_id=request.previous_response_id,
            reasoning=request.reasoning or {},
            store=request.store is not False,
            temperature=request.temperature,
            text=request.text or {"format": {"type": "text"}},
            tool_choice=request.tool_choice or "auto",
            tools=[{"strict": None, "parameters": None, **tool} for tool in request.tools or []],
            top_p=request.top_p,
            truncation=request.truncation or "disabled",
        )

    async def prepare(self) -> object:
        """Check the request, apply the chat template and tokenise."""
        self._generation = await self._turn.prepare()
        return self._generation

    def admit(self) -> Callable[[], None]:
        """Take places for its answer; the result gives them back."""
        release = self._generation.admit("input")
        if not self._request.background:
            return release
        # The answer goes out long before the work is done.
        self._release = release
        return lambda: None

    # -- the answer as it comes ---------------------------------------------------------------

    async def _events(self) -> AsyncGenerator[list[ResponseEvent], None]:
        """What happens, in order, while the response is filled; the last says how it ended."""
        yield [self._whole("response.created"), self._whole("response.in_progress")]
        tokens = 0
        async with aclosing(self._turn.parts()) as parts:
            async for part in parts:
                tokens += len(part.completion.token_ids)
                events = [new for found in part.events for new in self._items.add(found)]
                if part.finish_reason is not None:
                    events += self._end(part, tokens)
                if events:
                    yield events

    def _end(self, part: Part, tokens: int) -> list[ResponseEvent]:
        response = self._response
        cut = part.finish_reason == "length"
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        usage = self._generation.usage(tokens)
        response.usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )
        events = self._items.end(response.status)
        if response.store:
            messages = [*self._messages, *output_messages(self._items.items)]
            self._store.put(StoredResponse(response, messages))
        return [*events, self._whole(f"response.{response.status}")]

    def _whole(self, kind: str) -> ResponseEvent:
        """An event that carries the response as it is now."""
        response = self._response
        now = msgspec.structs.replace(response, output=list(response.output))
        return ResponseEvent(type=kind, response=now)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of named, numbered events."""
        number = 0
        async with aclosing(self._events()) as steps:
            async for step in steps:
                for record in step:
                    record.sequence_number = number
                    number += 1
                yield b"".join(map(_event, step))

    async def answer(self) -> ResponseObject:
        """The whole answer at once; of a background response, that it was begun."""
        if not self._request.background:
            await self._fill()
            return self._response
        self._response.status = "queued"
        stored = StoredResponse(self._response, self._messages)
        self._state.exchange_begins()
        stored.work = asyncio.create_task(self._work_behind(stored))
        self._store.put(stored)
        return msgspec.structs.replace(self._response)

    async def _fill(self) -> None:
        async with aclosing(self._events()) as steps:
            async for _ in steps:
                pass

    async def _work_behind(self, stored: StoredResponse) -> None:
        response = self._response
        response.status = "in_progress"
        try:
            await self._fill()
        except asyncio.CancelledError:
            self._items.end("incomplete")
            response.status = "cancelled"
        except Exception as error:
            info = error_info(error)
            response.status = "failed"
            response.error = ResponseFailure(code=info.code, message=info.message)
        finally:
            stored.work = None
            self._release()
            self._state.exchange_ends()


async def cancel(store: ResponseStore, id: str) -> ResponseObject:
    """Stop the work on a background response; the response as it is then."""
    stored = store.get(id)
    if not stored.response.background:
        raise ServerError(
            "invalid_value", "Only a background response can be cancelled.", "response_id"
        )
    work = stored.work
    if work is not None:
        work.cancel()
        await asyncio.wait({work})
    return stored.response
