"""How does a model whose chat template knows no tools hear of them?

They stand in the text of the conversation, with the way to call them that `gemma3` reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INSTRUCTIONS = """\
You have access to functions. If you decide to call one, answer with nothing but a JSON object of \
its name and its arguments, or with a list of such objects:
{{"name": "the function's name", "parameters": {{"an argument's name": "its value"}}}}

The functions are:
{functions}"""


def with_tools_in_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`messages` with `tools` described in the first, and calls and results as plain turns.

    A call becomes the text that the model would have written; a result a turn of the user's, since
    templates without tools refuse other roles.
    """
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(functions=functions)
    first = plain[0]
    if first["role"] == "system":
        told = {**first, "content": f"{first['content']}\n\n{instructions}"}
        return [told, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        name = message.get("name")
        said = f"Result of {name}: " if name else "Result: "
        return {"role": "user", "content": said + message["content"]}
    calls = message.get("tool_calls")
    if not calls:
        return message
    objects = [
        {"name": call["function"]["name"], "parameters": call["function"]["arguments"]}
        for call in calls
    ]
    written = json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False)
    content = "\n".join(filter(None, [message["content"], written]))
    return {"role": message["role"], "content": content}
