"""How is /v1/completions answered?"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jubako.entrypoints.server.exchange import StreamStyle
from jubako.entrypoints.server.generation import (
    Generation,
    check_common,
    event,
    fit_to_context,
    sampling_params,
    wants_usage,
)
from jubako.entrypoints.server.logprobs import (
    CompletionLogprobsWriter,
    TokenNames,
    prompt_logprobs,
)
from jubako.entrypoints.server.prompts import encode_prompts, split_prompts
from jubako.entrypoints.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from jubako.entrypoints.server.state import ServerState
from jubako.errors import ValidationError
from jubako.outputs import CompletionOutput, RequestOutput

DEFAULT_MAX_TOKENS = 16


class CompletionExchange:
    """One request to /v1/completions, from its record to its answer or the events of its stream."""

    stream_style = StreamStyle()

    def __init__(self, state: ServerState, request: CompletionRequest, request_id: str) -> None:
        self._state = state
        self._request = request
        self.id = f"cmpl-{request.request_id or request_id}"
        self._created = int(time.time())
        self._names = TokenNames(bool(request.return_tokens_as_token_ids))
        # With echo and max_tokens=0 only the prompt is wanted; the engine has to make one token.
        self._prompt_only = bool(request.echo) and request.max_tokens == 0
        self._echo_texts: list[str] = []

    async def prepare(self) -> Generation:
        """Check the request and tokenise its prompts."""
        request = self._request
        check_common(self._state, request)
        encoder = self._state.engine.config.encoder_config
        if request.echo and encoder.is_encoder_decoder:
            raise ValidationError(
                "echo=true: an encoder reads the prompt of this model, whose answer does not "
                "continue it; leave it out.",
                "echo",
                code="unsupported_parameter",
            )
        prompts = split_prompts(request.prompt)
        # A million short texts would be tokenised for a minute, only to be refused then.
        self._state.admission.check_size(len(prompts), 0, "prompt")
        add_special = request.add_special_tokens is not False
        truncated = request.truncate_prompt_tokens is not None
        token_ids = await encode_prompts(self._state, prompts, add_special, truncated)
        max_tokens = 1 if self._prompt_only else request.max_tokens
        params = []
        for i, ids in enumerate(token_ids):
            token_ids[i], limit = fit_to_context(
                self._state,
                ids,
                max_tokens,
                DEFAULT_MAX_TOKENS,
                request.truncate_prompt_tokens,
                "prompt",
                "max_tokens",
            )
            params.append(
                sampling_params(
                    request,
                    self._state.sampling_defaults,
                    max_tokens=limit,
                    logprobs=request.logprobs,
                    echo_logprobs=bool(request.echo),
                )
            )
        if request.echo:
            self._echo_texts = [
                self._echo_text(given, ids) for given, ids in zip(prompts, token_ids)
            ]
        self._generation = Generation(self._state, request, self.id, token_ids, params)
        return self._generation

    def admit(self) -> Callable[[], None]:
        """Take places for its answers; the result gives them back."""
        return self._generation.admit("prompt")

    def _echo_text(self, given: str | list[int], token_ids: list[int]) -> str:
        if isinstance(given, str) and self._request.truncate_prompt_tokens is None:
            return given
        largest = self._state.engine.ready.vocab_size - 1
        if any(not 0 <= token <= largest for token in token_ids):
            raise ValidationError(f"prompt has token ids outside 0 to {largest}.", "prompt")
        return self._state.engine.tokenizer.decode(token_ids)

    # -- shaping ------------------------------------------------------------------------------

    def _writer(self, prompt: int) -> CompletionLogprobsWriter:
        count = self._request.logprobs or 0
        if not self._request.echo:
            return CompletionLogprobsWriter(self._names, count)
        ids = self._generation.prompts[prompt]
        first = self._state.engine.tokenizer.decode(ids[:1], skip_special_tokens=False)
        return CompletionLogprobsWriter(self._names, count, first, self._echo_texts[prompt])

    def _choice(
        self,
        prompt: int,
        output: RequestOutput,
        completion: CompletionOutput,
        writer: CompletionLogprobsWriter | None,
        first: bool,
    ) -> CompletionChoice:
        """The choice for one output, which is the whole or what is new; `first` of its choice."""
        request = self._request
        text, token_ids = completion.text, completion.token_ids
        if self._prompt_only:
            text, token_ids = "", []
        logprobs: list[CompletionLogprobs] = []
        if request.echo and first:
            text = self._echo_texts[prompt] + text
            if writer is not None and output.prompt_logprobs is not None:
                ids = self._generation.prompts[prompt]
                logprobs.append(writer.write(ids, output.prompt_logprobs))
        if writer is not None and completion.logprobs is not None:
            logprobs.append(writer.write(token_ids, completion.logprobs[: len(token_ids)]))
        choice = CompletionChoice(
            index=prompt * self._generation.params[prompt].n + completion.index,
            text=text,
            logprobs=_joined(logprobs) if writer is not None else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if request.return_token_ids:
            choice.token_ids = token_ids
            if first:
                choice.prompt_token_ids = self._generation.prompts[prompt]
        if request.prompt_logprobs is not None and first and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self._created, model=self._state.model_name, choices=choices
        )

    # -- the two ways to answer ---------------------------------------------------------------

    async def answer(self) -> CompletionResponse:
        """The whole answer at once."""
        choices: list[CompletionChoice] = []
        tokens = 0
        async with aclosing(self._generation.outputs()) as outputs:
            async for prompt, output in outputs:
                for completion in output.outputs:
                    tokens += len(completion.token_ids)
                    writer = None if self._request.logprobs is None else self._writer(prompt)
                    choices.append(self._choice(prompt, output, completion, writer, first=True))
        choices.sort(key=lambda choice: choice.index)
        response = self._response(choices)
        response.usage = self._generation.usage(tokens, hidden=self._prompt_only)
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of events."""
        last_usage, every_usage = wants_usage(self._request)
        writers: dict[int, CompletionLogprobsWriter] = {}
        prompt_logprobs_of: dict[int, RequestOutput] = {}
        seen: set[int] = set()
        tokens = 0
        async with aclosing(self._generation.outputs()) as outputs:
            async for prompt, output in outputs:
                if output.prompt_logprobs is not None:
                    prompt_logprobs_of[prompt] = output
                for completion in output.outputs:
                    index = prompt * self._generation.params[prompt].n + completion.index
                    first = index not in seen
                    if first and not completion.token_ids and completion.finish_reason is None:
                        continue
                    seen.add(index)
                    tokens += len(completion.token_ids)
                    if self._request.logprobs is not None and index not in writers:
                        writers[index] = self._writer(prompt)
                    source = prompt_logprobs_of.get(prompt, output) if first else output
                    choice = self._choice(prompt, source, completion, writers.get(index), first)
                    chunk = self._response([choice])
                    if every_usage:
                        chunk.usage = self._generation.usage(tokens, self._prompt_only)
                    elif last_usage:
                        chunk.usage = None
                    yield event(chunk)
        if last_usage:
            chunk = self._response([])
            chunk.usage = self._generation.usage(tokens, self._prompt_only)
            yield event(chunk)


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs | None:
    """The lists of several parts, one behind the other."""
    if not parts:
        return None
    first = parts[0]
    for part in parts[1:]:
        first.text_offset += part.text_offset
        first.token_logprobs += part.token_logprobs
        first.tokens += part.tokens
        first.top_logprobs += part.top_logprobs
    return first
