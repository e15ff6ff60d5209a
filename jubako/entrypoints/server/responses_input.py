"""How does a request to /v1/responses become a turn of a conversation?"""

from __future__ import annotations

from typing import Any

from jubako.entrypoints.server.protocol import ChatCompletionRequest
from jubako.entrypoints.server.responses_protocol import (
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from jubako.errors import ValidationError

_ROLES = frozenset({"user", "assistant", "system", "developer"})


def as_chat(request: ResponsesRequest, earlier: list[dict[str, Any]]) -> ChatCompletionRequest:
    """The same request as a chat completion, behind the messages of `earlier` turns."""
    chat = ChatCompletionRequest(
        model=request.model,
        messages=[*instructions(request), *earlier, *input_messages(request)],
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        parallel_tool_calls=request.parallel_tool_calls,
        tool_choice=_choice(request.tool_choice),
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        cache_salt=request.cache_salt,
        priority=request.priority,
        response_format=_format(request.text),
    )
    if request.tools:
        chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.reasoning:
        chat.reasoning_effort = request.reasoning.get("effort")
    return chat


def instructions(request: ResponsesRequest) -> list[dict[str, Any]]:
    """What stands in front of every turn; earlier turns' instructions do not carry over."""
    if not request.instructions:
        return []
    return [{"role": "system", "content": request.instructions}]


def input_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The new messages of a conversation."""
    if request.input is None:
        raise ValidationError("input is required.", "input")
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(request.input):
        _add(messages, item, f"input[{i}]")
    return messages


def output_messages(items: list[Item]) -> list[dict[str, Any]]:
    """The model's own turn, as the next turn's conversation has it."""
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        match item:
            case MessageItem():
                turn["content"] += "".join(part.text for part in item.content)
            case ReasoningItem():
                turn["reasoning_content"] = "".join(part.text for part in item.content)
            case FunctionCallItem():
                turn.setdefault("tool_calls", []).append(
                    _call(item.call_id, item.name, item.arguments)
                )
    return [turn]


def _call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise ValidationError(
                f"{where}.role must be user, assistant, system or developer.",
                f"{where}.role",
                item.get("role"),
            )
        messages.append({"role": item["role"], "content": _content(item.get("content"), where)})
    elif kind == "function_call":
        # Calls of one turn are one message.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise ValidationError(f"{where}.call_id must be a string.", f"{where}.call_id")
        content = _content(item.get("output"), where, "output")
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or []
        texts = [str(p.get("text", "")) for p in parts if isinstance(p, dict)]
        messages.append({"role": "assistant", "content": "", "reasoning_content": "".join(texts)})
    else:
        raise ValidationError(
            f"{where} is of type {str(kind)[:40]!r}, which is not supported by this server.",
            f"{where}.type",
            code="unsupported_parameter",
        )


def _content(content: Any, where: str, field: str = "content") -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(
            f"{where}.{field} must be a string or a list of parts.", f"{where}.{field}"
        )
    return content


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None or not isinstance(given, dict):
        if given is not None:
            raise ValidationError("text.format must be an object.", "text.format")
        return None
    if given.get("type") != "json_schema":
        return given
    inner = {key: given[key] for key in ("name", "schema", "strict", "description") if key in given}
    return {"type": "json_schema", "json_schema": inner}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ValidationError(
            f"{where}.type={str(tool.get('type'))[:40]!r} is not supported by this server; only "
            "function is.",
            f"{where}.type",
            code="unsupported_parameter",
        )
    keys = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}
