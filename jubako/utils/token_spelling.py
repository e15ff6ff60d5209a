"""How do vocabularies spell bytes?

Tokenisers write the bytes of a token as text, in one of two ways: GPT-2's, which has a printable
stand-in for every byte, and SentencePiece's, with a visible space and `<0x0A>` for single bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 byte values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token that GPT-2's alphabet spells."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a token of SentencePiece."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


class Spelling(NamedTuple):
    """How a vocabulary spells bytes.

    `strips_space` says that a text which begins with a space has it removed, the one that
    SentencePiece put before the first word.
    """

    to_bytes: Callable[[str], bytes]
    strips_space: bool


def spelling_of(decoder: dict[str, Any] | None) -> Spelling | None:
    """The spelling that the `decoder` of a `tokenizer.json` undoes; None for another kind."""
    if decoder is None:
        return None
    steps: Sequence[dict[str, Any]] = [decoder]
    if decoder.get("type") == "Sequence":
        steps = decoder["decoders"]
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return Spelling(byte_level_bytes, strips_space=False)
    if names == ["Metaspace"]:
        scheme = steps[0].get("prepend_scheme", "always")
        return Spelling(sentencepiece_bytes, strips_space=scheme != "never")
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_space(steps[0]):
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if list(steps[3:]) in ([], [strip]):
            return Spelling(sentencepiece_bytes, strips_space=bool(steps[3:]))
    return None


def _replaces_space(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE} and step.get("content") == " "
