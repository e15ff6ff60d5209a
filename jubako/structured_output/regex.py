"""Which expression matches whole texts as a given one does, without its anchors?

An expression must match the whole output, so that anchors at the ends of its alternatives say
nothing; llguidance knows none.
"""

from __future__ import annotations

from jubako.errors import ValidationError

_ENDS = ("\\A", "\\Z", "\\z")


def without_anchors(regex: str) -> str:
    """`regex` without the anchors at its ends and around its top-level `|`.

    Raises `ValidationError` for an anchor elsewhere.
    """
    parts = _parts(regex)
    kept: list[str] = []
    depth = 0
    for i, part in enumerate(parts):
        if part in ("^", "$", *_ENDS):
            begins = i == 0 or parts[i - 1] == "|"
            ends = i + 1 == len(parts) or parts[i + 1] == "|"
            if depth or not (begins if part in ("^", "\\A") else ends):
                raise ValidationError(
                    f"structured_outputs.regex has the anchor {part} inside; the whole output must "
                    "match in any case, so leave it out, or write \\^ and \\$ for the characters.",
                    "structured_outputs.regex",
                )
            continue
        depth += (part == "(") - (part == ")")
        kept.append(part)
    return "".join(kept)


def _parts(regex: str) -> list[str]:
    """Characters, escapes and character classes."""
    parts: list[str] = []
    i = 0
    while i < len(regex):
        end = i + 1
        if regex[i] == "\\":
            end = i + 2
        elif regex[i] == "[":
            end = _class_end(regex, i)
        parts.append(regex[i:end])
        i = end
    return parts


def _class_end(regex: str, start: int) -> int:
    """Where the class that begins at `start` ends; at the end of `regex` if it is not closed."""
    depth = 0
    i = start
    while i < len(regex):
        char = regex[i]
        if char == "\\":
            i += 1
        elif char == "[":
            depth += 1
            # A bracket right behind the opening one, or its ^, stands for itself.
            i += regex[i + 1 : i + 2] == "^"
            i += regex[i + 1 : i + 2] == "]"
        elif char == "]":
            depth -= 1
            if not depth:
                return i + 1
        i += 1
    return len(regex)
