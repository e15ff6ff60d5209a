"""Which bytes does a token stand for?

A vocabulary is a table of byte strings, however its tokens are spelled; joining them and decoding
UTF-8 gives the text. That makes decoding a token independent of the ones around it, so that text
can be streamed without looking back, and takes a fraction of a microsecond.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 byte values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


class TokenBytes:
    """Id → bytes, filled as ids are asked for; unknown ids stand for nothing.

    `strips_space` says that a text which begins with a space has it removed, the one that
    SentencePiece put before the first word.
    """

    def __init__(
        self, backend: Backend, to_bytes: Callable[[str], bytes], strips_space: bool
    ) -> None:
        self._backend = backend
        self._to_bytes = to_bytes
        self.strips_space = strips_space
        self.table: dict[int, bytes] = {}

    @classmethod
    def of(cls, backend: Backend) -> TokenBytes | None:
        """The table of a byte-level or SentencePiece tokeniser; None for another kind."""
        steps = _decoder_steps(backend)
        names = [step.get("type") for step in steps]
        if names == ["ByteLevel"]:
            return cls(backend, _byte_level_bytes, strips_space=False)
        if names == ["Metaspace"]:
            scheme = steps[0].get("prepend_scheme", "always")
            return cls(backend, _sentencepiece_bytes, strips_space=scheme != "never")
        if names[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_space(steps[0]):
            strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            if steps[3:] in ([], [strip]):
                return cls(backend, _sentencepiece_bytes, strips_space=bool(steps[3:]))
        return None

    def __getitem__(self, token_id: int) -> bytes:
        value = self.table.get(token_id)
        if value is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                # Not kept: there is no end to the ids that a client can think of.
                return b""
            value = self.table[token_id] = self._to_bytes(token)
        return value


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


def _replaces_space(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE} and step.get("content") == " "
