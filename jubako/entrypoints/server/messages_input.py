"""How does a request to /v1/messages become a request to the model?"""

from __future__ import annotations

import json
from typing import Any

from jubako.entrypoints.server.messages_protocol import MessagesRequest, MessagesToCount
from jubako.entrypoints.server.protocol import ChatCompletionRequest
from jubako.errors import ValidationError

_IGNORED_BLOCKS = frozenset({"redacted_thinking"})


def as_chat(request: MessagesToCount) -> ChatCompletionRequest:
    """The same request as a chat completion; `ValidationError` names what cannot be one."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for i, message in enumerate(request.messages or []):
        messages += _messages(message, f"messages[{i}]")
    chat = ChatCompletionRequest(model=request.model, messages=messages)
    if request.tools:
        chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    _set_choice(chat, request.tool_choice)
    thinking = request.thinking
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise ValidationError(
                "thinking.type must be enabled, adaptive or disabled.", "thinking.type", kind
            )
        chat.chat_template_kwargs = {"enable_thinking": kind != "disabled"}
        chat.include_reasoning = kind != "disabled"
    if isinstance(request, MessagesRequest):
        if request.max_tokens is None:
            raise ValidationError("max_tokens is required.", "max_tokens")
        chat.max_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.stream = request.stream
        chat.temperature = request.temperature
        chat.top_k = request.top_k
        chat.top_p = request.top_p
    return chat


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(f"{where} must be a string or a list of blocks.", where)
    texts: list[str] = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise _not_taken(kind, f"{where}[{i}]")
        if not isinstance(block.get("text"), str):
            raise ValidationError(f"{where}[{i}].text must be a string.", f"{where}[{i}].text")
        texts.append(block["text"])
    return "\n".join(texts)


def _not_taken(kind: Any, where: str) -> ValidationError:
    if not isinstance(kind, str):
        return ValidationError(f"{where} must be an object with a type.", where)
    return ValidationError(
        f"{where} is of type {kind[:40]!r}; this model takes text only.",
        f"{where}.type",
        code="unsupported_parameter",
    )


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ValidationError(f"{where}.role must be user or assistant.", f"{where}.role", role)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ValidationError(
            f"{where}.content must be a string or a list of blocks.", f"{where}.content"
        )
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, at))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind not in _IGNORED_BLOCKS:
            texts.append(_text([block], f"{where}.content"))
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    # Results come before what the user adds to them.
    return results if results and not texts else [*results, turn]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
        raise ValidationError(f"{where} must have a name, and an input that is an object.", where)
    function = {"name": block["name"], "arguments": json.dumps(block.get("input", {}))}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise ValidationError(
            f"{where}.tool_use_id must be a string, the id of a call.", f"{where}.tool_use_id"
        )
    text = _text(block.get("content") or "", f"{where}.content")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind != "custom":
        raise ValidationError(
            f"{where}.type={str(kind)[:40]!r} is not supported by this server; only custom is.",
            f"{where}.type",
            code="unsupported_parameter",
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _set_choice(chat: ChatCompletionRequest, choice: dict[str, Any] | None) -> None:
    if choice is None:
        return
    kind = choice.get("type")
    if kind in ("auto", "none"):
        chat.tool_choice = kind
    elif kind == "any":
        chat.tool_choice = "required"
    elif kind == "tool":
        chat.tool_choice = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        raise ValidationError(
            "tool_choice.type must be auto, any, tool or none.", "tool_choice.type", kind
        )
    if choice.get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False
