"""Which tools may an answer call, and must it?"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from jubako.entrypoints.server.protocol import ChatCompletionRequest
from jubako.errors import ValidationError
from jubako.frontend.answers.constrained import arguments_of, call_list
from jubako.frontend.answers.parser import AnswerStyle
from jubako.frontend.answers.registry import ModelStyle
from jubako.sampling_params import StructuredOutputsParams

MAX_TOOLS = 128
_NAME = re.compile(r"[\w.\-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request.

    `choice` is `auto`, `required`, or the name of the one that is called. `several` says whether an
    answer may hold more than one call.
    """

    tools: list[dict[str, Any]]
    """In the shape in which chat templates take them."""
    choice: str
    several: bool

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def forced(self) -> bool:
        """Whether the answer is a call whatever the model would rather say."""
        return self.choice != "auto"

    def constraint(self) -> StructuredOutputsParams | None:
        """What makes a forced answer a call."""
        if not self.forced:
            return None
        if self.choice != "required":
            tool = next(t for t in self.tools if t["function"]["name"] == self.choice)
            return StructuredOutputsParams(json=_arguments_schema(tool))
        calls: dict[str, Any] = {"type": "array", "minItems": 1}
        calls["items"] = {"anyOf": [_call_schema(tool) for tool in self.tools]}
        if not self.several:
            calls["maxItems"] = 1
        return StructuredOutputsParams(json=calls)

    def forced_style(self) -> AnswerStyle:
        """How a forced answer is written."""
        calls = call_list if self.choice == "required" else arguments_of(self.choice)
        return AnswerStyle(calls=calls)


def _arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"].get("parameters") or {}
    return parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(tool: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool["function"]["name"]},
            "parameters": _arguments_schema(tool),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def read_tools(request: ChatCompletionRequest) -> ToolUse | None:
    """The tools that the answer to `request` may use; None if there are none to use.

    Raises `ValidationError` for a tool or a choice that cannot be meant.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise ValidationError("tool_choice needs tools.", "tool_choice")
        return None
    tools = checked_tools(request.tools)
    if choice == "none":
        return None
    names = [tool["function"]["name"] for tool in tools]
    return ToolUse(tools, _choice(choice, names), request.parallel_tool_calls is not False)


def checked_tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a request, each a function with a name of its own."""
    if len(given) > MAX_TOOLS:
        raise ValidationError(
            f"tools has {len(given)} entries; at most {MAX_TOOLS} are taken.", "tools", len(given)
        )
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValidationError(f"tools[{i}].function.name={name!r} stands twice.", "tools", name)
    return tools


def _choice(choice: str | dict[str, Any] | None, names: list[str]) -> str:
    if choice is None or choice in ("auto", "required"):
        return choice or "auto"
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(choice, dict) or choice.get("type", "function") != "function" or name is None:
        raise ValidationError(
            "tool_choice must be none, auto, required, or an object of type function that names "
            "one of tools.",
            "tool_choice",
        )
    if name not in names:
        raise ValidationError(
            f"tool_choice names {str(name)[:64]!r}, which is none of tools.", "tool_choice", name
        )
    return str(name)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise ValidationError(f"{where} must be an object of type function.", where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ValidationError(f"{where}.function must be an object.", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValidationError(
            f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or underscores.",
            f"{where}.function.name",
            name,
        )
    if not isinstance(function.get("description", ""), str):
        raise ValidationError(
            f"{where}.function.description must be a string.", f"{where}.function.description"
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise ValidationError(
            f"{where}.function.parameters must be a JSON schema, an object.",
            f"{where}.function.parameters",
        )
    return {**tool, "type": "function"}


def new_call_id(style: ModelStyle) -> str:
    """An id for a call; Mistral's templates take none but nine letters and digits."""
    if style.tools == "mistral":
        return uuid.uuid4().hex[:9]
    return f"call_{uuid.uuid4().hex[:24]}"


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's earlier message, their arguments as templates take them."""
    if not isinstance(calls, list):
        raise ValidationError(f"{where} must be a list.", where)
    return [_earlier_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _earlier_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValidationError(
            f"{where} must be an object with a function that has a name.", f"{where}.function"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (ValueError, RecursionError):
            # A model wrote them; what it gets to see again is what it wrote.
            arguments = {"arguments": arguments}
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    normal: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        normal["id"] = call["id"]
    return normal
