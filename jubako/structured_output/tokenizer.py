"""How does llguidance know a model's vocabulary?"""

from __future__ import annotations

from typing import cast

from llguidance import LLTokenizer, TokenizerWrapper

from jubako.structured_output.vocabulary import Vocabulary


class _Source:
    """What `LLTokenizer` asks of a tokeniser.

    Where only one text may follow, it wants that text's tokens: they are the longest that fit, one
    after the other, which is what merging makes of nearly every text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = eos_token_id
        special = set(vocabulary.special)
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(vocabulary.tokens):
            if text and token not in special:
                # Of single bytes that have two tokens the later one is the usual.
                self._ids[text] = token
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                token = self._ids.get(data[start:end])
                if token is not None:
                    ids.append(token)
                    start = end
                    break
            else:
                break
        return ids


def make_tokenizer(vocabulary: Vocabulary, eos_token_ids: list[int]) -> LLTokenizer:
    """Takes about a second for a quarter of a million tokens, with Python's lock held."""
    source = cast(TokenizerWrapper, _Source(vocabulary, eos_token_ids[0]))
    return LLTokenizer(source, eos_token=eos_token_ids)
