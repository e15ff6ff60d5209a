"""How does a conversation become the parts of its next answer?

What every interface for conversations has in common: the prompt, the parameters, and answers that
come apart into thoughts, content and calls.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from jubako.entrypoints.server.generation import (
    Generation,
    check_common,
    fit_to_context,
    sampling_params,
)
from jubako.entrypoints.server.prompts import encode, normalise_messages, render_chat
from jubako.entrypoints.server.protocol import ChatCompletionRequest
from jubako.entrypoints.server.state import ServerState
from jubako.entrypoints.server.tools import ToolUse, read_tools
from jubako.errors import ValidationError
from jubako.frontend.answers.events import Arguments, Call, Content, Event, Reasoning
from jubako.frontend.answers.parser import AnswerParser, AnswerStyle
from jubako.outputs import CompletionOutput, RequestOutput


@dataclass
class Part:
    """What is new of one answer: the engine's record and what was found in its text."""

    output: RequestOutput
    completion: CompletionOutput
    events: list[Event]
    finish_reason: str | None
    """As OpenAI has it: `tool_calls` where the model stopped to have tools called."""
    called: bool
    """Whether the answer has called a tool so far."""


class ChatTurn:
    """One turn of a conversation, from its request to the parts of its answers."""

    def __init__(self, state: ServerState, request: ChatCompletionRequest, id: str) -> None:
        self._state = state
        self._request = request
        self._id = id
        self.messages: list[dict[str, Any]] = []
        self.tools: ToolUse | None = None
        self._style: AnswerStyle | None = None

    async def prepare(self, logprobs: int | None = None) -> Generation:
        """Check the request, apply the chat template and tokenise."""
        request = self._request
        check_common(self._state, request)
        self.tools = read_tools(request)
        self.messages = normalise_messages(request.messages)
        text = await render_chat(
            self._state, request, self.messages, self.tools.tools if self.tools else None
        )
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
            logprobs=logprobs,
        )
        self._style = self._answer_style(text)
        if self._style is not None:
            # Tags and markers may be special tokens.
            params.skip_special_tokens = False
        if self.tools is not None and self.tools.forced:
            if params.structured_outputs is not None:
                raise ValidationError(
                    "tool_choice makes the answer a call, so it cannot have another form too; "
                    "leave out response_format and structured_outputs.",
                    "tool_choice",
                )
            params.structured_outputs = self.tools.constraint()
        self.generation = Generation(self._state, request, self._id, [token_ids], [params])
        return self.generation

    def _answer_style(self, prompt: str) -> AnswerStyle | None:
        if self.tools is not None and self.tools.forced:
            return self.tools.forced_style()
        return self._state.model_style.of_answer(prompt, with_tools=self.tools is not None)

    @property
    def parses(self) -> bool:
        """Whether answers are taken apart, so that text may be held back."""
        return self._style is not None

    async def parts(self) -> AsyncGenerator[Part, None]:
        """The parts of all answers as they come; in a stream each is what is new."""
        answers: dict[int, _Answer] = {}
        names = frozenset() if self.tools is None else self.tools.names
        async with aclosing(self.generation.outputs()) as outputs:
            async for _, output in outputs:
                for completion in output.outputs:
                    answer = answers.get(completion.index)
                    if answer is None:
                        several = self.tools is None or self.tools.several
                        hides = self._request.include_reasoning is False
                        answer = _Answer(self._style, names, several, hides)
                        answers[completion.index] = answer
                    events = answer.events(completion)
                    reason = completion.finish_reason
                    if reason == "stop" and answer.calls and not self._is_named:
                        reason = "tool_calls"
                    yield Part(output, completion, events, reason, called=answer.calls > 0)

    @property
    def _is_named(self) -> bool:
        return self.tools is not None and self.tools.choice not in ("auto", "required")


class _Answer:
    """One answer while it comes: its parser, and what of it is shown."""

    def __init__(
        self,
        style: AnswerStyle | None,
        names: frozenset[str],
        several: bool,
        hides_reasoning: bool,
    ) -> None:
        self._parser = None if style is None else AnswerParser(style, names)
        self._several = several
        self._hides_reasoning = hides_reasoning
        self.calls = 0

    def events(self, completion: CompletionOutput) -> list[Event]:
        """What the text of `completion`, which is new, holds."""
        if self._parser is None:
            return [Content(completion.text)] if completion.text else []
        events = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            events += self._parser.end()
        return [event for event in events if self._is_shown(event)]

    def _is_shown(self, event: Event) -> bool:
        match event:
            case Reasoning():
                return not self._hides_reasoning
            case Call():
                self.calls += 1
                return self._several or self.calls == 1
            case Arguments():
                return self._several or self.calls == 1
        return True
