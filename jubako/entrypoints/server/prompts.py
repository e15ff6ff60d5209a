"""How do the prompts of a request become token ids?

Long texts are tokenised on a thread, so that other streams do not wait for them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from jubako.entrypoints.server.errors import ServerError
from jubako.entrypoints.server.protocol import ChatCompletionRequest, TokenizeRequest
from jubako.entrypoints.server.state import ServerState
from jubako.entrypoints.server.tools import read_calls
from jubako.errors import ValidationError
from jubako.frontend.answers.tool_prompt import with_tools_in_text

INLINE_CHARACTERS = 2000
"""Texts up to this length cost less to tokenise than to hand to a thread."""

TEMPLATE_ARGUMENTS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    }
)
"""Names that `chat_template_kwargs` may not redefine."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_KEPT_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""What a message may say beside its role and content; templates look for it."""


async def encode(
    state: ServerState,
    text: str,
    add_special_tokens: bool,
    parameter: str,
    truncated: bool = False,
    inline: bool = True,
) -> list[int]:
    """Token ids of `text`; far too long a text is refused without tokenising it.

    A short text is tokenised at once; not `inline` where there are many of them.
    """
    tokenizer = state.engine.tokenizer
    if inline and len(text) <= INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_long() -> list[int]:
        if not truncated and tokenizer.cannot_fit(len(text), state.max_model_len):
            raise ValidationError(
                f"The prompt has {len(text)} characters, far more than the {state.max_model_len} "
                "tokens that the model's context holds; shorten it.",
                parameter,
                len(text),
                code="context_length_exceeded",
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await asyncio.to_thread(encode_long)


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts in the `prompt` field: a text, token ids, or a list of texts or of token ids."""
    if prompt is None:
        raise ValidationError("prompt is required.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise ValidationError(
            "prompt must be a string, a list of token ids, or a list of either.", "prompt"
        )
    if not prompt:
        raise ValidationError("prompt must not be an empty list.", "prompt", prompt)
    if type(prompt[0]) is int:
        return [_token_ids(prompt, "prompt")]
    if isinstance(prompt[0], str):
        for i, text in enumerate(prompt):
            if not isinstance(text, str):
                raise ValidationError(f"prompt[{i}] must be a string, like prompt[0].", "prompt")
        return list(prompt)
    prompts: list[str | list[int]] = []
    for i, ids in enumerate(prompt):
        if not isinstance(ids, list):
            raise ValidationError(f"prompt[{i}] must be a string or a list of token ids.", "prompt")
        prompts.append(_token_ids(ids, f"prompt[{i}]"))
    return prompts


def _token_ids(ids: list[Any], name: str) -> list[int]:
    for i, token in enumerate(ids):
        if type(token) is not int:
            raise ValidationError(
                f"{name}[{i}] must be a token id, an integer; a prompt is all text or all ids.",
                "prompt",
            )
    return ids


async def encode_prompts(
    state: ServerState,
    prompts: list[str | list[int]],
    add_special_tokens: bool,
    truncated: bool,
) -> list[list[int]]:
    """Token ids of each prompt."""
    encoded: list[list[int]] = []
    inline = sum(len(p) for p in prompts if isinstance(p, str)) <= INLINE_CHARACTERS
    for prompt in prompts:
        if not prompt:
            # Special tokens that the tokeniser adds do not make an empty prompt a prompt.
            raise ValidationError(
                "The prompt is empty; it must have at least one token.", "prompt", prompt
            )
        if isinstance(prompt, str):
            prompt = await encode(state, prompt, add_special_tokens, "prompt", truncated, inline)
        encoded.append(prompt)
    return encoded


def normalise_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: a role, and content that is one string."""
    if not messages:
        raise ValidationError("messages must hold at least one message.", "messages", messages)
    return [_normalise_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalise_message(message: dict[str, Any], name: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise ValidationError(
            f"{name}.role must be system, developer, user, assistant or tool.", f"{name}.role", role
        )
    if message.get("function_call"):
        raise ValidationError(
            f"{name}.function_call is not supported by this server; use tool_calls.",
            f"{name}.function_call",
            code="unsupported_parameter",
        )
    normal = {
        "role": "system" if role == "developer" else role,
        "content": _normalise_content(message.get("content"), role, f"{name}.content"),
    }
    for field in _KEPT_FIELDS:
        if isinstance(message.get(field), str):
            normal[field] = message[field]
    if role == "assistant" and message.get("tool_calls"):
        normal["tool_calls"] = read_calls(message["tool_calls"], f"{name}.tool_calls")
    return normal


def _normalise_content(content: Any, role: str, name: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise ValidationError(f"{name} must be a string or a list of text parts.", name)
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            if isinstance(kind, str):
                raise ValidationError(
                    f"{name}[{i}] is of type {kind[:40]!r}; this model takes text only.",
                    f"{name}[{i}].type",
                    code="unsupported_parameter",
                )
            raise ValidationError(
                f"{name}[{i}] must be an object with a type and a text.", f"{name}[{i}]"
            )
        if not isinstance(part.get("text"), str):
            raise ValidationError(f"{name}[{i}].text must be a string.", f"{name}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


async def render_chat(
    state: ServerState,
    request: ChatCompletionRequest | TokenizeRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The text that the chat template makes of `messages` and `tools`."""
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    if continues and adds_prompt:
        raise ValidationError(
            "continue_final_message and add_generation_prompt cannot both be true.",
            "continue_final_message",
        )
    if continues and messages[-1]["role"] != "assistant":
        raise ValidationError(
            "continue_final_message needs the last message to be the assistant's.",
            "continue_final_message",
        )
    arguments = dict(request.chat_template_kwargs or {})
    for name in arguments:
        if name in TEMPLATE_ARGUMENTS:
            raise ValidationError(
                f"chat_template_kwargs must not hold {name}; it has a field of its own.",
                "chat_template_kwargs",
            )
    if isinstance(request, ChatCompletionRequest) and request.documents is not None:
        arguments["documents"] = request.documents
    if isinstance(request, ChatCompletionRequest) and request.reasoning_effort is not None:
        _set_effort(arguments, request.reasoning_effort)
    if not state.model_style.template_takes_tools:
        messages = with_tools_in_text(messages, tools or [])
    elif tools is not None:
        arguments["tools"] = tools
    tokenizer = state.engine.tokenizer
    if state.chat_template is None and tokenizer.chat_template is None:
        raise ServerError(
            "unsupported_parameter",
            "The model has no chat template; use /v1/completions, or start the server with "
            "--chat-template.",
            "messages",
        )

    def render() -> str:
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            chat_template=state.chat_template,
            **arguments,
        )

    size = sum(len(message["content"]) for message in messages)
    if size <= INLINE_CHARACTERS and not arguments:
        return render()
    return await asyncio.to_thread(render)


def _set_effort(arguments: dict[str, Any], effort: str) -> None:
    """Tell the template how much to think; templates know one of these names, if any."""
    if effort not in _EFFORTS:
        raise ValidationError(
            f"reasoning_effort={effort[:40]!r} must be one of {', '.join(_EFFORTS)}.",
            "reasoning_effort",
            effort,
        )
    if effort == "none":
        arguments.setdefault("enable_thinking", False)
    else:
        arguments.setdefault("reasoning_effort", effort)
