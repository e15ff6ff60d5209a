"""Which bytes does a token stand for?

A vocabulary is a table of byte strings, however its tokens are spelled; joining them and decoding
UTF-8 gives the text. That makes decoding a token independent of the ones around it, so that text
can be streamed without looking back, and takes a fraction of a microsecond.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import Tokenizer as Backend

from jubako.utils.token_spelling import spelling_of


class TokenBytes:
    """Id → bytes, filled as ids are asked for; unknown ids stand for nothing.

    `strips_space`: see `jubako.utils.token_spelling.Spelling`.
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
        if backend.decoder is None:
            return None
        spelling = spelling_of(json.loads(backend.decoder.__getstate__()))
        return None if spelling is None else cls(backend, *spelling)

    def __getitem__(self, token_id: int) -> bytes:
        value = self.table.get(token_id)
        if value is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                # Not kept: there is no end to the ids that a client can think of.
                return b""
            value = self.table[token_id] = self._to_bytes(token)
        return value
