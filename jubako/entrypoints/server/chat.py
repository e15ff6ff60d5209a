"""How is /v1/chat/completions answered?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jubako.entrypoints.server.chat_turn import ChatTurn, Part
from jubako.entrypoints.server.exchange import StreamStyle
from jubako.entrypoints.server.generation import Generation, event, wants_usage
from jubako.entrypoints.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from jubako.entrypoints.server.protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
)
from jubako.entrypoints.server.state import ServerState
from jubako.entrypoints.server.tools import new_call_id
from jubako.errors import ValidationError
from jubako.frontend.answers.events import Arguments, Call, Content, Event, Reasoning
from jubako.frontend.answers.parser import ParsedAnswer
from jubako.outputs import CompletionOutput

ROLE = "assistant"


class ChatExchange:
    """One request to /v1/chat/completions, from its record to its answer or its events."""

    stream_style = StreamStyle()

    def __init__(self, state: ServerState, request: ChatCompletionRequest, request_id: str) -> None:
        self._state = state
        self._request = request
        self.id = f"chatcmpl-{request.request_id or request_id}"
        self._created = int(time.time())
        self._names = TokenNames(bool(request.return_tokens_as_token_ids))
        self._echo_text = ""
        self._turn = ChatTurn(state, request, self.id)

    async def prepare(self) -> Generation:
        """Check the request, apply the chat template and tokenise."""
        self._top_logprobs = self._check_logprobs()
        generation = await self._turn.prepare(self._top_logprobs)
        last = self._turn.messages[-1]
        if self._request.echo and last["role"] == ROLE:
            self._echo_text = last["content"]
        self._generation = generation
        return generation

    def admit(self) -> Callable[[], None]:
        """Take places for its answers; the result gives them back."""
        return self._generation.admit("messages")

    def _check_logprobs(self) -> int | None:
        """How many logprobs beside the chosen token's to ask the engine for; None for none."""
        wanted, top = self._request.logprobs, self._request.top_logprobs
        if not wanted:
            if top:
                raise ValidationError(f"top_logprobs={top} needs logprobs=true.", "top_logprobs")
            return None
        limit = self._state.engine.config.model_config.max_logprobs
        top = top or 0
        if top < -1 or (limit >= 0 and (top > limit or top == -1)):
            raise ValidationError(f"top_logprobs={top} must be 0 to {limit}.", "top_logprobs", top)
        return top

    # -- shaping ------------------------------------------------------------------------------

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self._top_logprobs is None or completion.logprobs is None:
            return None
        return chat_logprobs(
            completion.token_ids, completion.logprobs, self._top_logprobs, self._names
        )

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self._created, model=self._state.model_name, choices=choices
        )

    # -- the two ways to answer ---------------------------------------------------------------

    async def answer(self) -> ChatCompletionResponse:
        """The whole answer at once."""
        request, generation = self._request, self._generation
        choices: list[ChatChoice] = []
        prompt_positions = None
        tokens = 0
        async with aclosing(self._turn.parts()) as parts:
            async for part in parts:
                prompt_positions = part.output.prompt_logprobs or prompt_positions
                tokens += len(part.completion.token_ids)
                choice = ChatChoice(
                    index=part.completion.index,
                    message=self._message(part),
                    logprobs=self._logprobs(part.completion),
                    finish_reason=part.finish_reason,
                    stop_reason=part.completion.stop_reason,
                )
                if request.return_token_ids:
                    choice.token_ids = part.completion.token_ids
                choices.append(choice)
        choices.sort(key=lambda choice: choice.index)
        response = ChatCompletionResponse(
            id=self.id,
            created=self._created,
            model=self._state.model_name,
            choices=choices,
            usage=generation.usage(tokens),
        )
        if request.return_token_ids:
            response.prompt_token_ids = generation.prompts[0]
        if prompt_positions is not None:
            response.prompt_logprobs = prompt_logprobs(prompt_positions)
        return response

    def _message(self, part: Part) -> ChatMessage:
        found = ParsedAnswer()
        found.add(part.events)
        content = self._echo_text + found.content
        message = ChatMessage(role=ROLE, content=content or (None if found.calls else ""))
        if found.reasoning:
            message.reasoning_content = found.reasoning
        if found.calls:
            message.tool_calls = [
                ToolCall(
                    id=self._call_id(),
                    type="function",
                    function=CalledFunction(name=call.name, arguments=call.arguments),
                )
                for call in found.calls
            ]
        return message

    def _call_id(self) -> str:
        return new_call_id(self._state.model_style)

    def _opening(self) -> list[ChatCompletionChunk]:
        """The first chunk of every choice: the role, and an echo if one was asked for."""
        delta = ChatDelta(role=ROLE, content=self._echo_text)
        chunks = [
            self._chunk([ChatChunkChoice(index=i, delta=delta)])
            for i in range(self._generation.params[0].n)
        ]
        if self._request.return_token_ids:
            chunks[0].prompt_token_ids = self._generation.prompts[0]
        return chunks

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of events."""
        generation = self._generation
        last_usage, every_usage = wants_usage(self._request)
        opened = False
        tokens = 0
        calls: Counter[int] = Counter()
        async with aclosing(self._turn.parts()) as parts:
            async for part in parts:
                chunks: list[ChatCompletionChunk] = []
                if not opened:
                    opened = True
                    chunks += self._opening()
                tokens += len(part.completion.token_ids)
                chunks += self._chunks(part, calls)
                for chunk in chunks:
                    if every_usage:
                        chunk.usage = generation.usage(tokens)
                    elif last_usage:
                        chunk.usage = None
                if chunks:
                    yield b"".join(map(event, chunks))
        if last_usage:
            chunk = self._chunk([])
            chunk.usage = generation.usage(tokens)
            yield event(chunk)

    def _chunks(self, part: Part, calls: Counter[int]) -> list[ChatCompletionChunk]:
        """One chunk for each event; what belongs to the tokens stands on the first, the end last.

        Text that is held back, because it may be the beginning of a marker, makes no chunk, unless
        something is to be said of its tokens. `calls` counts by choice.
        """
        completion = part.completion
        deltas = [self._delta(found, completion.index, calls) for found in part.events]
        logprobs = self._logprobs(completion)
        token_ids = completion.token_ids if self._request.return_token_ids else []
        if not deltas and (logprobs or token_ids or part.finish_reason or not self._turn.parses):
            deltas = [ChatDelta(content="")]
        chunks = [ChatChunkChoice(index=completion.index, delta=delta) for delta in deltas]
        if chunks:
            chunks[0].logprobs = logprobs
            if self._request.return_token_ids:
                chunks[0].token_ids = token_ids
            if part.finish_reason is not None:
                chunks[-1].finish_reason = part.finish_reason
                chunks[-1].stop_reason = completion.stop_reason
        return [self._chunk([choice]) for choice in chunks]

    def _delta(self, found: Event, index: int, calls: Counter[int]) -> ChatDelta:
        match found:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text)
            case Call(name):
                calls[index] += 1
                begun = ToolCall(
                    index=calls[index] - 1,
                    id=self._call_id(),
                    type="function",
                    function=CalledFunction(name=name, arguments=""),
                )
                return ChatDelta(tool_calls=[begun])
            case Arguments(text):
                more = ToolCall(index=calls[index] - 1, function=CalledFunction(arguments=text))
                return ChatDelta(tool_calls=[more])
