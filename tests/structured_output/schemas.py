"""JSON schemas as people write them, made up from a seed.

Each can be satisfied, and whatever satisfies it has an end: strings, lists and numbers are bounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ["id", "name", "title", "street", "city", "count", "price", "tags", "status", "owner"]
_NAMES += ["email", "created", "value", "level", "note", "kind", "size", "weight", "color", "parts"]
_NAMES += ["unit", "ratio", "score", "label", "héight", "größe", "first-name", "x_1", "$cost"]
_WORDS = ["red", "green", "in stock", "n/a", 'quoted "yes"', "línea", "a\\b", "", "日本", "🙂"]
_PATTERNS = [
    "^[a-z]{2,8}$",
    "^[A-Z][a-z]{1,7}( [A-Z][a-z]{1,7})?$",
    r"^\d{3}-\d{4}$",
    "^(yes|no|maybe)$",
    "^#[0-9a-f]{6}$",
    r"^v\d{1,2}\.\d{1,2}$",
]
_FORMATS = ["date", "uuid", "ipv4", "ipv6"]
_MAX_DEPTH = 3


class _Maker:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.definitions: dict[str, Schema] = {}

    def schema(self, depth: int = 0) -> Schema:
        leaves = [self.string, self.integer, self.number, self.boolean, self.null, self.enum]
        leaves += [self.constant, self.pattern, self.format]
        inner = [self.object, self.object, self.array, self.tuple, self.any_of, self.reference]
        inner += [self.nullable, self.all_of]
        choices: list[Callable[[int], Schema]]
        choices = inner if not depth else leaves if depth >= _MAX_DEPTH else [*leaves, *inner]
        return self._random.choice(choices)(depth)

    def _pick(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    # -- leaves -------------------------------------------------------------------------------

    def string(self, depth: int) -> Schema:
        least = self._pick(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._pick(0, 12)}

    def integer(self, depth: int) -> Schema:
        low = self._pick(-1000, 1000)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + self._pick(0, 500)}
        if self._random.random() < 0.3:
            schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 50}
        elif self._random.random() < 0.2:
            schema = {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 5}
        return schema

    def number(self, depth: int) -> Schema:
        low = self._pick(-50, 50)
        # Without a step the digits behind the point have no end.
        high = low + self._pick(1, 9) / 2
        return {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.5}

    def boolean(self, depth: int) -> Schema:
        return {"type": "boolean"}

    def null(self, depth: int) -> Schema:
        return {"type": "null"}

    def enum(self, depth: int) -> Schema:
        values: list[Any] = self._random.sample(_WORDS, self._pick(1, 5))
        if self._random.random() < 0.3:
            values += [self._pick(0, 9), None, True]
        return {"enum": values}

    def constant(self, depth: int) -> Schema:
        return {"const": self._random.choice([*_WORDS, 7, -1.5, False, None, [1, "a"], {"k": 1}])}

    def pattern(self, depth: int) -> Schema:
        return {"type": "string", "pattern": self._random.choice(_PATTERNS)}

    def format(self, depth: int) -> Schema:
        return {"type": "string", "format": self._random.choice(_FORMATS)}

    # -- what holds others --------------------------------------------------------------------

    def object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._pick(1, 5))
        schema: Schema = {
            "type": "object",
            "description": "Something with " + ", ".join(names),
            "properties": {name: self.schema(depth + 1) for name in names},
            "required": [name for name in names if self._random.random() < 0.7],
            "additionalProperties": False,
        }
        return schema

    def array(self, depth: int) -> Schema:
        least = self._pick(0, 2)
        return {
            "type": "array",
            "items": self.schema(depth + 1),
            "minItems": least,
            "maxItems": least + self._pick(0, 3),
        }

    def tuple(self, depth: int) -> Schema:
        items = [self.schema(depth + 1) for _ in range(self._pick(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth + 1) for _ in range(self._pick(2, 3))]}

    def nullable(self, depth: int) -> Schema:
        return {"type": ["boolean", "null"], "title": "Perhaps"}

    def all_of(self, depth: int) -> Schema:
        name = self._random.choice(_NAMES)
        bounded = {"allOf": [{"type": "integer"}, {"minimum": 1}, {"maximum": 9}]}
        open_ended = {"type": "object", "properties": {name: bounded}, "required": [name]}
        return {"allOf": [open_ended], "additionalProperties": False, "properties": {name: {}}}

    def reference(self, depth: int) -> Schema:
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.schema(depth + 1)
        return {"$ref": f"#/$defs/{name}"}


def make_schema(seed: int) -> Schema:
    """A schema; the same for the same seed."""
    maker = _Maker(seed)
    schema = maker.schema()
    if maker.definitions:
        schema = {**schema, "$defs": maker.definitions}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
