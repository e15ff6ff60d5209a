"""How does a conversation become one text? Chat templates, in jinja2's sandbox."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from jubako.errors import ValidationError

GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- if messages[0].role in ('system', 'developer') -%}
    {%- set ns.system = messages[0].content | trim + '\\n\\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- set role = 'model' -%}
    {%- elif message.role == 'user' -%}
        {%- set role = 'user' -%}
    {%- else -%}
        {{- raise_exception('a message of role ' ~ message.role ~ ' has no place here') -}}
    {%- endif -%}
    {{- '<start_of_turn>' ~ role ~ '\\n' ~ ns.system ~ message.content | trim -}}
    {{- '<end_of_turn>\\n' -}}
    {%- set ns.system = '' -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
"""Gemma's turns, for files without a template.

Documented at https://ai.google.dev/gemma/docs/core/prompt-structure. There is no system turn: its
text stands before that of the first user turn.
"""


def render_chat(
    template: str,
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special_tokens: dict[str, str] | None = None,
    **kwargs: Any,
) -> str:
    """Render `messages` by a Jinja `template` as transformers does.

    The template sees `messages`, `add_generation_prompt`, the special tokens' texts, `kwargs`, and
    the functions `raise_exception` and `strftime_now`. With `continue_final_message` the text ends
    with the last message's content, which the model then goes on with. Raises `ValidationError` for
    unusable messages and whatever goes wrong in the template.
    """
    messages = _plain_messages(messages)
    if continue_final_message and add_generation_prompt:
        raise ValidationError(
            "continue_final_message goes on with the last message and add_generation_prompt begins "
            "a new one; set one of them to false.",
            "continue_final_message",
            True,
        )
    from jinja2.exceptions import TemplateError

    variables = {**(special_tokens or {}), **kwargs}
    try:
        text = _compile(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
    except TemplateError as error:
        raise ValidationError(f"The chat template fails: {error}.", "messages") from None
    except RecursionError:
        raise ValidationError("The chat template fails: too much recursion.", "messages") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ValidationError(
            f"The chat template fails on these messages: {error}.", "messages"
        ) from None
    return _cut_after_final(text, messages[-1]) if continue_final_message else text


def _plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies; content given as a list of text parts becomes one string."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValidationError("messages must be a list of at least one message.", "messages")
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValidationError(
                f"{where} must be an object with a role (system, user, assistant).", where
            )
        plain.append({**message, "content": _plain_content(message.get("content"), where)})
    return plain


def _plain_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(
            f"{where}.content must be a string or a list of parts.", f"{where}.content"
        )
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValidationError(
                f"{where}.content has a part of type {kind!r}; this model takes text only.",
                f"{where}.content",
            )
    return "\n".join(texts)


def _cut_after_final(text: str, message: dict[str, Any]) -> str:
    content = message["content"].strip()
    at = text.rfind(content) if content else -1
    if at < 0:
        raise ValidationError(
            "continue_final_message needs a last message whose content appears in the text that "
            "the chat template makes.",
            "continue_final_message",
        )
    end = at + len(content)
    # Spaces at the end of the content are the beginning of what follows, if the template kept them.
    full = message["content"].lstrip()
    return text[: at + len(full)] if text.startswith(full, at) else text[:end]


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    # Imported here: it takes 30 ms, and a plain completion does not need it.
    from datetime import datetime

    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model wrote, for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
