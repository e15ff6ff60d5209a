"""Which ways of writing calls and thoughts are known, and which of them does a model have?"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jubako.errors import ConfigError
from jubako.frontend.answers.deepseek import deepseek
from jubako.frontend.answers.gemma import functiongemma, gemma3
from jubako.frontend.answers.harmony import harmony
from jubako.frontend.answers.hermes import hermes
from jubako.frontend.answers.llama_json import llama3_json
from jubako.frontend.answers.mistral import mistral
from jubako.frontend.answers.parser import AnswerStyle, Style
from jubako.frontend.answers.pythonic import pythonic
from jubako.frontend.answers.reasoning import think_tags

CHANNELS = "openai"
"""Name of the style whose messages say themselves whether they are thoughts or calls."""

TOOL_STYLES: dict[str, Style] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": mistral,
    "deepseek_v3": deepseek,
    "gemma3": gemma3,
    "functiongemma": functiongemma,
    CHANNELS: harmony,
}
"""Name, as in `--tool-call-parser`, → how that family writes calls."""

_ALIASES = {
    "qwen": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseek_v31": "deepseek_v3",
    "gemma": "gemma3",
    "harmony": CHANNELS,
    "gpt_oss": CHANNELS,
}

THINK_TAGS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""Name, as in `--reasoning-parser`, → the tags around thoughts."""

_REASONING_ALIASES = {
    "deepseek_r1": "think",
    "qwen3": "think",
    "harmony": CHANNELS,
    "gpt_oss": CHANNELS,
}

AUTO, NONE = "auto", "none"

# What stands in a family's chat template, the most telling first.
_TOOL_MARKS = (
    ("<|channel|>", CHANNELS),
    ("<tool_call>", "hermes"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "functiongemma"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<|eom_id|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
_REASONING_MARKS = (
    ("<|channel|>", CHANNELS),
    ("</think>", "think"),
    ("[/THINK]", "mistral"),
)
_TAKES_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ModelStyle:
    """How a model writes; names of `TOOL_STYLES` and `THINK_TAGS`, None for what it does not mark.

    `template_takes_tools` is false where the chat template would drop the tools of a request, which
    then stand in its text.
    """

    tools: str | None
    reasoning: str | None
    template_takes_tools: bool = True

    def of_answer(self, prompt: str, with_tools: bool) -> AnswerStyle | None:
        """The style of the answer to `prompt`, the rendered chat; None where it is plain text."""
        channels = CHANNELS in (self.reasoning, self.tools)
        if channels and (with_tools or self.reasoning == CHANNELS):
            return AnswerStyle(calls=harmony)
        reasoning = None
        if self.reasoning is not None:
            begin, end = THINK_TAGS[self.reasoning]
            reasoning = think_tags(begin, end, inside=prompt.rstrip().endswith(begin))
        calls = TOOL_STYLES[self.tools] if with_tools and self.tools is not None else None
        if reasoning is None and calls is None:
            return None
        return AnswerStyle(reasoning, calls)


def model_style(template: str | None, tools: str = AUTO, reasoning: str = AUTO) -> ModelStyle:
    """The style named by `tools` and `reasoning`, or found in the chat template.

    A template that knows no tools gets `gemma3`, which reads calls as most models write them when
    they are asked to in words. Raises `ConfigError` for an unknown name.
    """
    template = template or ""
    takes_tools = bool(_TAKES_TOOLS.search(template))
    found_tools = _named(tools, "tool_call_parser", TOOL_STYLES, _ALIASES)
    if tools == AUTO:
        found_tools = _found(template, _TOOL_MARKS) if takes_tools else None
        found_tools = found_tools or "gemma3"
    found_reasoning = _named(
        reasoning, "reasoning_parser", (*THINK_TAGS, CHANNELS), _REASONING_ALIASES
    )
    if reasoning == AUTO:
        found_reasoning = _found(template, _REASONING_MARKS)
    return ModelStyle(found_tools, found_reasoning, takes_tools)


def _found(template: str, marks: tuple[tuple[str, str], ...]) -> str | None:
    return next((name for mark, name in marks if mark in template), None)


def _named(
    name: str, option: str, known: Collection[str], aliases: Mapping[str, str]
) -> str | None:
    if name in (AUTO, NONE):
        return None
    name = aliases.get(name, name)
    if name not in known:
        raise ConfigError(
            f"{option}={name!r} is not known; take {AUTO}, {NONE}, {', '.join(known)}.", option
        )
    return name
