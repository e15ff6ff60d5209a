"""How is /v1/chat/completions answered?"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from jubako.entrypoints.server.generation import (
    Generation,
    check_common,
    event,
    fit_to_context,
    sampling_params,
    wants_usage,
)
from jubako.entrypoints.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from jubako.entrypoints.server.prompts import encode, normalise_messages, render_chat
from jubako.entrypoints.server.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from jubako.entrypoints.server.state import ServerState
from jubako.errors import ValidationError
from jubako.outputs import CompletionOutput

ROLE = "assistant"


class ChatExchange:
    """One request to /v1/chat/completions, from its record to its answer or its events."""

    def __init__(self, state: ServerState, request: ChatCompletionRequest, request_id: str) -> None:
        self._state = state
        self._request = request
        self.id = f"chatcmpl-{request.request_id or request_id}"
        self._created = int(time.time())
        self._names = TokenNames(bool(request.return_tokens_as_token_ids))
        self._echo_text = ""

    async def prepare(self) -> Generation:
        """Check the request, apply the chat template and tokenise."""
        request = self._request
        check_common(self._state, request)
        self._top_logprobs = self._check_logprobs()
        messages = normalise_messages(request.messages)
        text = await render_chat(self._state, request, messages)
        # The template writes the start-of-sequence token itself.
        token_ids = await encode(
            self._state,
            text,
            bool(request.add_special_tokens),
            "messages",
            request.truncate_prompt_tokens is not None,
        )
        by_new_name = request.max_completion_tokens is not None
        token_ids, limit = fit_to_context(
            self._state,
            token_ids,
            request.max_completion_tokens if by_new_name else request.max_tokens,
            self._state.sampling_defaults.get("max_tokens"),
            request.truncate_prompt_tokens,
            "messages",
            "max_completion_tokens" if by_new_name else "max_tokens",
        )
        params = sampling_params(
            request,
            self._state.sampling_defaults,
            max_tokens=limit,
            logprobs=self._top_logprobs,
        )
        if request.echo and messages[-1]["role"] == ROLE:
            self._echo_text = messages[-1]["content"]
        self._generation = Generation(self._state, request, self.id, [token_ids], [params])
        return self._generation

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
        async with aclosing(generation.outputs()) as outputs:
            async for _, output in outputs:
                prompt_positions = output.prompt_logprobs or prompt_positions
                for completion in output.outputs:
                    tokens += len(completion.token_ids)
                    choice = ChatChoice(
                        index=completion.index,
                        message=ChatMessage(role=ROLE, content=self._echo_text + completion.text),
                        logprobs=self._logprobs(completion),
                        finish_reason=completion.finish_reason,
                        stop_reason=completion.stop_reason,
                    )
                    if request.return_token_ids:
                        choice.token_ids = completion.token_ids
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
        request, generation = self._request, self._generation
        last_usage, every_usage = wants_usage(request)
        opened = False
        tokens = 0
        async with aclosing(generation.outputs()) as outputs:
            async for _, output in outputs:
                chunks: list[ChatCompletionChunk] = []
                if not opened:
                    opened = True
                    chunks += self._opening()
                for completion in output.outputs:
                    tokens += len(completion.token_ids)
                    choice = ChatChunkChoice(
                        index=completion.index,
                        delta=ChatDelta(content=completion.text),
                        logprobs=self._logprobs(completion),
                        finish_reason=completion.finish_reason,
                    )
                    if completion.finish_reason is not None:
                        choice.stop_reason = completion.stop_reason
                    if request.return_token_ids:
                        choice.token_ids = completion.token_ids
                    chunks.append(self._chunk([choice]))
                for chunk in chunks:
                    if every_usage:
                        chunk.usage = generation.usage(tokens)
                    elif last_usage:
                        chunk.usage = None
                yield b"".join(map(event, chunks))
        if last_usage:
            chunk = self._chunk([])
            chunk.usage = generation.usage(tokens)
            yield event(chunk)
