"""How do logprobs look in OpenAI's two shapes?

JSON has no infinity: an impossible token has `IMPOSSIBLE`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.entrypoints.server.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from jubako.outputs import Logprob, PositionLogprobs

IMPOSSIBLE = -9999.0


class TokenNames:
    """What tokens are called: their text, or `token_id:N` when the request asks for that."""

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids

    def __call__(self, token: int, logprob: Logprob) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        return logprob.decoded_token or ""


def finite(logprob: float) -> float:
    """`logprob`, or the number that stands for impossible."""
    return max(logprob, IMPOSSIBLE)


class CompletionLogprobsWriter:
    """Logprobs of one choice in the completions shape.

    `text_offset` counts characters from the start of the choice's text, over all calls. An echoed
    prompt's first token has no logprob; `first_token` is its text, and `text` the echoed prompt.
    """

    def __init__(
        self, names: TokenNames, count: int, first_token: str = "", text: str = ""
    ) -> None:
        self._names = names
        self._count = count
        # A start-of-sequence token that the tokeniser added takes no room in the text.
        self._first = Logprob(0.0, None, first_token)
        self._first_width = len(first_token) if text.startswith(first_token) else 0
        self._offset = 0

    def write(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """Shape `positions`, one a token, with the likeliest tokens of each."""
        result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, position in zip(token_ids, positions, strict=True):
            result.text_offset.append(self._offset)
            if position is None:
                result.tokens.append(self._names(token, self._first))
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                self._offset += self._first_width
                continue
            entry = position[token]
            name = self._names(token, entry)
            likeliest: dict[str, float] = {}
            for other, logprob in _likeliest(position, self._count):
                likeliest.setdefault(self._names(other, logprob), finite(logprob.logprob))
            likeliest.setdefault(name, finite(entry.logprob))
            result.tokens.append(name)
            result.token_logprobs.append(finite(entry.logprob))
            result.top_logprobs.append(likeliest)
            self._offset += len(entry.decoded_token or "")
        return result


def _likeliest(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens (-1: all); the chosen one only if it is among them."""
    ranked = sorted(position.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    count: int,
    names: TokenNames,
) -> ChatLogprobs:
    """Logprobs of `token_ids` in the chat shape, with the `count` likeliest at each position."""
    content: list[TokenLogprob] = []
    for token, position in zip(token_ids, positions, strict=True):
        entry = position[token]
        name = names(token, entry)
        content.append(
            TokenLogprob(
                token=name,
                logprob=finite(entry.logprob),
                bytes=_bytes(entry),
                top_logprobs=[
                    TopLogprob(
                        token=names(other, logprob),
                        logprob=finite(logprob.logprob),
                        bytes=_bytes(logprob),
                    )
                    for other, logprob in _likeliest(position, count)
                ],
            )
        )
    return ChatLogprobs(content=content)


def _bytes(logprob: Logprob) -> list[int]:
    return list((logprob.decoded_token or "").encode("utf-8", "replace"))


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """Prompt logprobs as vLLM's responses have them: None first, then a map a position."""
    return [
        None
        if position is None
        else {
            token: PromptLogprob(
                logprob=finite(entry.logprob),
                rank=entry.rank,
                decoded_token=entry.decoded_token,
            )
            for token, entry in position.items()
        }
        for position in positions
    ]
