"""Which grammar stands for a `StructuredOutputsParams`, and is it one that can be followed?

Everything is brought into llguidance's form. Its limits bound what the compilation costs, and ours
the size of what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from jubako.errors import ValidationError
from jubako.sampling_params import StructuredOutputsParams
from jubako.structured_output.regex import without_anchors

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Of these exactly one says what is wanted."""
NAME = "structured_outputs"

MAX_BYTES = 256 << 10
"""Largest schema, expression, grammar or list of choices."""
MAX_CHOICES = 10_000
MAX_TAGS = 256

WHITESPACE = r" {1,2}|\n[ \t]{0,24}"
"""What may stand between the parts of JSON unless told otherwise: a space or two, or a new line and
its indentation. Were any amount allowed, small models would go on with it for ever."""

_LARGE = 4096
_SHOWN = 300
"""Characters of an error of llguidance that are passed on."""
_REWORDED = {
    "Unimplemented keys:": "keywords that are not supported:",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf": "the alternatives of a oneOf overlap; use anyOf",
}
"""What llguidance says of itself → what our users can do."""
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "contains")
_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")


def limits() -> LLParserLimits:
    """What a grammar may cost: see docs/structured-output.md."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=100_000, verbose_errors=False)


def checked(params: Any) -> StructuredOutputsParams:
    """A private copy of `params` that can be followed, with a schema as text.

    Raises `ValidationError` that names the field and says what is wrong.
    """
    if not isinstance(params, StructuredOutputsParams):
        raise ValidationError(
            f"{NAME} must be a StructuredOutputsParams, got {type(params).__name__}.", NAME
        )
    kind = _kind(params)
    for name in _OPTIONS:
        if type(getattr(params, name)) is not bool:
            raise _error(name, "must be true or false")
    if not isinstance(params.whitespace_pattern, str | None):
        raise _error("whitespace_pattern", "must be a string, a regular expression")
    if params.whitespace_pattern is not None and params.disable_any_whitespace:
        raise _error("whitespace_pattern", "cannot be combined with disable_any_whitespace")
    value = _CHECKS[kind](getattr(params, kind))
    result = msgspec.structs.replace(params, **{kind: value})
    _check_grammar(kind, grammar_of(result))
    return result


def is_large(params: Any) -> bool:
    """Whether to look at `params` takes longer than an event loop should be kept."""
    if not isinstance(params, StructuredOutputsParams):
        return False
    if isinstance(params.json, dict):
        # How much is in it is not known without going through it.
        return True
    texts = (params.json, params.regex, params.grammar, params.structural_tag)
    size = sum(len(text) for text in texts if isinstance(text, str))
    return size + 16 * len(params.choice or ()) > _LARGE


def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's form; `ValidationError` for what has none."""
    kind = _kind(params)
    return _GRAMMARS[kind](getattr(params, kind), params)


def _kind(params: StructuredOutputsParams) -> str:
    given = [name for name in KINDS if getattr(params, name) is not None]
    if len(given) != 1:
        raise ValidationError(
            f"{NAME} must have exactly one of {', '.join(KINDS)}, got "
            f"{' and '.join(given) if given else 'none'}.",
            NAME,
        )
    return given[0]


def _error(field: str, problem: str) -> ValidationError:
    return ValidationError(f"{NAME}.{field} {problem}.", f"{NAME}.{field}")


@lru_cache(maxsize=64)
def _problem(grammar: str) -> str | None:
    """What llguidance has against a grammar."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return messages[0] if is_error else None


def _check_grammar(kind: str, grammar: str) -> None:
    problem = _problem(grammar)
    if problem is None:
        return
    lines = [line.strip() for line in problem.splitlines()]
    shown = " ".join(line for line in lines if line and line != "<non-verbose/>")
    for theirs, ours in _REWORDED.items():
        shown = shown.replace(theirs, ours)
    raise _error(kind, f"cannot be followed: {shown[:_SHOWN]}")


# -- what is given ----------------------------------------------------------------------------


def _check_size(field: str, text: str) -> str:
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise _error(field, f"has {size} bytes; at most {MAX_BYTES} are taken")
    return text


def _checked_text(field: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise _error(field, "must be a non-empty string")
        return _check_size(field, value)

    return check


def _checked_json(value: Any) -> str:
    if isinstance(value, dict):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _error("json", f"is no JSON: {error}") from None
    if not isinstance(value, str):
        raise _error("json", "must be a JSON schema, an object or its text")
    _check_size("json", value)
    try:
        schema = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise _error("json", f"is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _error("json", "must be a JSON schema, an object or its text")
    return value


def _checked_choice(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(c, str) for c in value):
        raise _error("choice", "must be a non-empty list of strings")
    if len(value) > MAX_CHOICES:
        raise _error("choice", f"has {len(value)} entries; at most {MAX_CHOICES} are taken")
    if not all(value):
        raise _error("choice", "must not have an empty string")
    _check_size("choice", "".join(value))
    return list(value)


def _checked_json_object(value: Any) -> bool:
    if value is not True:
        raise _error("json_object", "must be true, or left out")
    return True


def _checked_tag(value: Any) -> str:
    if isinstance(value, dict):
        value = json.dumps(value)
    return _checked_text("structural_tag")(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "json": _checked_json,
    "regex": _checked_text("regex"),
    "choice": _checked_choice,
    "grammar": _checked_text("grammar"),
    "json_object": _checked_json_object,
    "structural_tag": _checked_tag,
}

# -- grammars ---------------------------------------------------------------------------------


def _json_grammar(schema: str | dict[str, Any], params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if params.disable_additional_properties:
        schema = closed(msgspec.json.decode(schema) if isinstance(schema, str) else schema)
    # What stands in a schema's own "x-guidance" must not change what was asked for.
    options: JsonCompileOptions = {
        "lenient": False,
        "coerce_one_of": False,
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not params.disable_any_whitespace,
    }
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))
    except ValueError as error:
        raise _error("json", f"cannot be followed: {str(error)[:_SHOWN]}") from None


def closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in _MAP_KEYWORDS:
        if isinstance(schema.get(key), dict):
            result[key] = {name: closed(value) for name, value in schema[key].items()}
    for key in _SCHEMA_KEYWORDS:
        if key in schema:
            result[key] = closed(schema[key])
    for key in _LIST_KEYWORDS:
        if isinstance(schema.get(key), list):
            result[key] = [closed(value) for value in schema[key]]
    if "properties" in result or result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def _object_grammar(value: bool, params: StructuredOutputsParams) -> str:
    return _json_grammar('{"type":"object"}', params)


def _regex_grammar(regex: str, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(without_anchors(regex)))


def _choice_grammar(choices: list[str], params: StructuredOutputsParams) -> str:
    # One lexeme: as rules, thousands of them would take seconds.
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, dict.fromkeys(choices)))


def _own_grammar(text: str, params: StructuredOutputsParams) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the library raises plain Exception
        raise _error("grammar", f"cannot be read: {str(error)[:_SHOWN]}") from None


def _tag_grammar(text: str, params: StructuredOutputsParams) -> str:
    from llguidance import StructTag

    tag = _read_tag(text)
    tags: list[StructTag] = []
    for structure in tag.structures:
        trigger = next((t for t in tag.triggers if t and structure.begin.startswith(t)), None)
        if trigger is None:
            raise _error("structural_tag", "has a structure that begins with none of its triggers")
        tags.append(
            StructTag(
                trigger=trigger,
                begin=structure.begin,
                grammar=structure.json_schema,
                end=structure.end,
            )
        )
    return str(StructTag.to_grammar(tags, assume_special=False))


class _Structure(msgspec.Struct):
    begin: str
    json_schema: dict[str, Any] = msgspec.field(name="schema")
    end: str


class _Tag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _read_tag(text: str) -> _Tag:
    try:
        tag = msgspec.json.decode(text, type=_Tag)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise _error(
            "structural_tag",
            f"must be JSON with structures (begin, schema, end) and triggers: {error}",
        ) from None
    if not 1 <= len(tag.structures) <= MAX_TAGS:
        raise _error("structural_tag", f"must have 1 to {MAX_TAGS} structures")
    return tag


_GRAMMARS: dict[str, Callable[[Any, StructuredOutputsParams], str]] = {
    "json": _json_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _own_grammar,
    "json_object": _object_grammar,
    "structural_tag": _tag_grammar,
}
