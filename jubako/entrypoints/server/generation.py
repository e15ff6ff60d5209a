"""How does one HTTP request become engine requests, and their outputs one stream?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from jubako.entrypoints.server.errors import ServerError
from jubako.entrypoints.server.forms import as_client_named, read_form
from jubako.entrypoints.server.gate import REQUEST_ID
from jubako.entrypoints.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    PromptTokensDetails,
    Usage,
)
from jubako.entrypoints.server.state import ServerState
from jubako.errors import EngineGenerateError, ValidationError
from jubako.outputs import RequestOutput
from jubako.sampling_params import RequestOutputKind, SamplingParams

_SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
"""Request fields that are sampling parameters under the same name."""


def sampling_params(
    request: GenerationRequest,
    defaults: dict[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    echo_logprobs: bool = False,
) -> SamplingParams:
    """Sampling parameters of `request`; unset fields are the model's, then the neutral ones."""
    values: dict[str, Any] = {}
    for name in _SAMPLING_FIELDS:
        value = getattr(request, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            values[name] = value
    if echo_logprobs and values.get("prompt_logprobs") is None:
        values["prompt_logprobs"] = logprobs
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        **values,
        structured_outputs=read_form(request),
        max_tokens=max_tokens,
        logprobs=logprobs,
        output_kind=kind,
    )


def check_common(state: ServerState, request: GenerationRequest) -> None:
    """What holds for both interfaces, beyond the types of the fields."""
    check_model(state, request.model)
    supported = state.engine.ready.supported_tasks
    if "generate" not in supported:
        raise ValidationError(
            f"The model {state.model_name!r} writes no text; it supports {', '.join(supported)}.",
            "model",
            code="unsupported_task",
        )
    if request.stream_options is not None and not request.stream:
        raise ValidationError("stream_options needs stream=true.", "stream_options")
    if request.stream and request.prompt_logprobs not in (None, 0):
        raise ValidationError(
            f"prompt_logprobs={request.prompt_logprobs} is not available in a stream; leave it "
            "out, or set stream=false.",
            "prompt_logprobs",
        )
    if request.priority and state.engine.ready.scheduling_policy != "priority":
        raise ValidationError(
            f"priority={request.priority} needs a server started with "
            "--scheduling-policy priority.",
            "priority",
            request.priority,
        )
    if request.cache_salt == "":
        raise ValidationError("cache_salt must not be an empty string.", "cache_salt", "")
    if request.request_id is not None and not REQUEST_ID.fullmatch(request.request_id):
        raise ValidationError(
            "request_id must be 1 to 128 printable ASCII characters without spaces.", "request_id"
        )


def check_model(state: ServerState, model: str | None) -> None:
    """Raise `model_not_found` unless `model` is the one that is served, or not named."""
    if model is not None and model not in state.model_names:
        raise ServerError(
            "model_not_found",
            f"The model {model[:200]!r} is not served here; this server has {state.model_name!r}.",
            "model",
        )


def fit_to_context(
    state: ServerState,
    prompt: list[int],
    max_tokens: int | None,
    default: int | None,
    truncate: int | None,
    parameter: str,
    max_tokens_parameter: str,
) -> tuple[list[int], int]:
    """The prompt, truncated if that was asked for, and the most tokens it may produce.

    `max_tokens` that was asked for must fit beside the prompt; unset, it is what is left of the
    context, or `default` if that is less. Of an encoder-decoder model the prompt is the encoder's,
    which has room of its own, and the answer stands behind what the decoder begins with.
    """
    context = state.max_model_len
    encoder = state.engine.config.encoder_config
    longest = encoder.max_input_tokens if encoder.is_encoder_decoder else context
    if max_tokens is not None and max_tokens < 1:
        raise ValidationError(
            f"{max_tokens_parameter}={max_tokens} must be at least 1.",
            max_tokens_parameter,
            max_tokens,
        )
    if truncate is not None:
        if truncate < -1 or truncate == 0 or truncate > longest:
            raise ValidationError(
                f"truncate_prompt_tokens={truncate} must be -1, or 1 to {longest}.",
                "truncate_prompt_tokens",
                truncate,
            )
        beside = 0 if encoder.is_encoder_decoder else max_tokens or 1
        keep = max(1, longest - beside) if truncate == -1 else truncate
        prompt = prompt[-keep:]
    decoders = encoder.default_decoder_prompt if encoder.is_encoder_decoder else prompt
    room = context - len(decoders)
    if len(prompt) > longest or room < 1:
        holds = f"model's context holds {context}, output included"
        if encoder.is_encoder_decoder:
            holds = f"model's encoder reads {longest}"
        raise ValidationError(
            f"The prompt has {len(prompt)} tokens, and the {holds}; shorten it.",
            parameter,
            len(prompt),
            code="context_length_exceeded",
        )
    if max_tokens is None:
        return prompt, room if default is None else max(1, min(room, default))
    if max_tokens > room:
        raise ValidationError(
            f"The prompt has {len(decoders)} tokens and {max_tokens_parameter} is {max_tokens}, "
            f"but the model's context holds {context}; ask for at most {room}.",
            max_tokens_parameter,
            max_tokens,
            code="context_length_exceeded",
        )
    return prompt, max_tokens


class Generation:
    """The engine requests of one HTTP request: one for each of its prompts.

    `outputs` yields each output with the index of its prompt. Ending it early aborts them all.
    """

    def __init__(
        self,
        state: ServerState,
        request: CompletionRequest | ChatCompletionRequest,
        request_id: str,
        prompts: list[list[int]],
        params: list[SamplingParams],
    ) -> None:
        self.state = state
        self.request = request
        self.request_id = request_id
        self.prompts = prompts
        self.params = params
        self.cached_tokens = [0] * len(prompts)

    def admit(self, parameter: str) -> Callable[[], None]:
        """Take places for all engine requests; the result gives them back."""
        requests = sum(params.n for params in self.params)
        tokens = sum(len(prompt) * params.n for prompt, params in zip(self.prompts, self.params))
        at_fault = "n" if requests > len(self.prompts) == 1 else parameter
        return self.state.admission.admit(requests, tokens, at_fault)

    def _start(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        request_id = self.request_id
        if len(self.prompts) > 1:
            request_id += f"-{index}"
        source = self.state.engine.generate(
            {"prompt_token_ids": self.prompts[index]},
            self.params[index],
            request_id,
            priority=self.request.priority or 0,
            cache_salt=self.request.cache_salt,
        )
        return self.state.running(request_id, source)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come."""
        async with aclosing(self._outputs()) as outputs:
            try:
                async for output in outputs:
                    yield output
            except ValidationError as error:
                raise as_client_named(error, self.request) from None

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        if len(self.prompts) == 1:
            async with aclosing(self._start(0)) as source:
                async for output in source:
                    yield 0, self._checked(0, output)
            return
        sources = [self._start(i) for i in range(len(self.prompts))]
        # One pending output a prompt: what is not taken here waits, merged, in the engine's front.
        pending = {_next(source): i for i, source in enumerate(sources)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    # A prompt that is refused says so before others have said anything.
                    task.result()
                for task in sorted(done, key=pending.__getitem__):
                    index = pending.pop(task)
                    new = task.result()
                    if new is None:
                        continue
                    pending[_next(sources[index])] = index
                    yield index, self._checked(index, new)
        finally:
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)
            for task in pending:
                if not task.cancelled():
                    task.exception()
            for source in sources:
                await source.aclose()

    def _checked(self, index: int, output: RequestOutput) -> RequestOutput:
        self.cached_tokens[index] = max(self.cached_tokens[index], output.num_cached_tokens)
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise EngineGenerateError("The engine could not finish this request.")
            if completion.finish_reason == "abort":
                self.state.check_accepting()
                raise EngineGenerateError("The request was aborted before it was finished.")
        return output

    def usage(self, completion_tokens: int, hidden: bool = False) -> Usage:
        """Tokens so far; `hidden` when the generated ones are not part of the answer."""
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = 0 if hidden else completion_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached_tokens)),
        )


def _next(source: AsyncGenerator[RequestOutput, None]) -> asyncio.Task[RequestOutput | None]:
    async def step() -> RequestOutput | None:
        return await anext(source, None)

    return asyncio.ensure_future(step())


def wants_usage(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether a stream ends with a chunk of usage, and whether every chunk has it."""
    options = request.stream_options
    if options is None:
        return False, False
    last = True if options.include_usage is None else options.include_usage
    return last, last and bool(options.continuous_usage_stats)


def event(record: msgspec.Struct, name: str | None = None) -> bytes:
    """A server-sent event that carries `record`, under a name if it has one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(record) + b"\n\n"


_encode = msgspec.json.Encoder().encode
