"""How far has one request come in its grammar, and which tokens may follow?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jubako.errors import EngineGenerateError, ValidationError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = np.ndarray[Any, np.dtype[np.int32]]
"""Token masks: bits of int32 words, the lowest first; a set bit allows the token."""


class Matcher:
    """The place of one request in its grammar.

    An end-of-sequence token is taken where the grammar may end; after it nothing else is allowed.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos = eos_token_ids
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token was taken."""
        return self._ended

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were kept; EngineGenerateError for one that was not allowed."""
        for token in token_ids:
            if token in self._eos:
                if not (self._ended or self.matcher.is_accepting()):
                    raise self._unexpected(token)
                self._ended = True
            elif self._ended or not self._try(token):
                raise self._unexpected(token)

    def _try(self, token: int) -> bool:
        # An error would stay in the matcher; a try leaves it as it was.
        return self.matcher.try_consume_tokens([token]) == 1

    def _unexpected(self, token: int) -> EngineGenerateError:
        self.check()
        return EngineGenerateError(
            f"Token {token} was chosen, which the grammar of structured_outputs does not allow "
            "there. Other parameters leave no token that it allows, bad_words for instance."
        )

    def check(self) -> None:
        """Raise `ValidationError` if the grammar has become too complex to go on."""
        if self.matcher.is_error():
            problem = self.matcher.get_error().partition("\n")[0]
            raise ValidationError(
                f"structured_outputs became too complex to follow: {problem}. Use a simpler form.",
                "structured_outputs",
            )

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts`, from the first on, the grammar allows."""
        if self._ended:
            return next((i for i, t in enumerate(drafts) if t not in self._eos), len(drafts))
        count = 0
        taken = 0
        try:
            for token in drafts:
                if token in self._eos:
                    count += self.matcher.is_accepting()
                    break
                if token < 0 or not self._try(token):
                    break
                taken += 1
                count += 1
        finally:
            self._take_back(taken)
        return count

    def fill(self, rows: Words, drafts: Sequence[int]) -> None:
        """Write the masks [1 + drafts, words] of the next token and of those behind each draft.

        Behind a draft that cannot be kept anything is allowed.
        """
        if self._ended:
            self.fill_end(rows)
            return
        taken = 0
        try:
            for i, row in enumerate(rows):
                self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                self.check()
                if i == len(drafts):
                    break
                token = drafts[i]
                if token < 0 or token in self._eos or not self._try(token):
                    rows[i + 1 :] = -1
                    break
                taken += 1
        finally:
            self._take_back(taken)

    def fill_end(self, rows: Words) -> None:
        """Allow nothing but to end."""
        rows[:] = 0
        for token in self._eos:
            if token < rows.shape[1] * 32:
                rows.view(np.uint32)[:, token // 32] |= np.uint32(1 << token % 32)

    def _take_back(self, count: int) -> None:
        if count and not self.matcher.rollback(count):
            self.check()
