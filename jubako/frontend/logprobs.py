"""How do arrays of logprobs become what a user reads: token, text, rank?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jubako.engine.messages import EngineCoreOutput
from jubako.outputs import Logprob, PositionLogprobs
from jubako.sampling_params import SamplingParams
from jubako.scheduler.model_output import LogprobsLists

if TYPE_CHECKING:
    from jubako.frontend.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What bytes decode to that are no whole character."""

_MAX_CHARACTER_TOKENS = 3
"""Tokens before the last one that may belong to the same character; UTF-8 has at most 4 bytes."""

_CACHED_TOKENS = 1 << 16


class TokenTexts:
    """The text of single tokens. One object serves all requests: most ask for the same few."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text_of: Callable[[int], str] = functools.lru_cache(_CACHED_TOKENS)(self._decode)

    def _decode(self, token_id: int) -> str:
        # By its bytes, since decoders drop the space in front of what they take for the first word.
        return self._tokenizer.bytes_of(token_id).decode(errors="replace")

    def text_after(self, token_id: int, before: Sequence[int]) -> str:
        """The text that `token_id` adds after the tokens `before`.

        A token that completes a character stands for the whole of it, one that leaves a character
        incomplete for nothing.
        """
        text = self.text_of(token_id)
        if not text.endswith(REPLACEMENT):
            return text
        for count in range(1, min(_MAX_CHARACTER_TOKENS, len(before)) + 1):
            context = list(before[-count:])
            head = self._tokenizer.decode(context, skip_special_tokens=False)
            if not head.endswith(REPLACEMENT):
                # The characters before are whole, so this one begins here.
                break
            whole = self._tokenizer.decode([*context, token_id], skip_special_tokens=False)
            kept = head.rstrip(REPLACEMENT)
            if whole.startswith(kept) and not whole.endswith(REPLACEMENT):
                return whole[len(kept) :]
        return ""


class LogprobsProcessor:
    """Gathers the logprobs of one request.

    `logprobs` has one entry per generated token, `prompt_logprobs` one per prompt token, the first
    None; both are None unless asked for. `cumulative_logprob` sums those of the chosen tokens.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], texts: TokenTexts | None
    ) -> None:
        self._texts = texts
        self._prompt_token_ids = prompt_token_ids
        # The first token may complete a character that the prompt begins.
        self._before = list(prompt_token_ids[-_MAX_CHARACTER_TOKENS:])
        self.logprobs: list[PositionLogprobs] | None = None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.cumulative_logprob: float | None = None
        if params.logprobs is not None:
            self.logprobs = []
            self.cumulative_logprob = 0.0
        self._wants_prompt = params.prompt_logprobs is not None

    def update(self, output: EngineCoreOutput) -> None:
        """Take over what a step brought."""
        if output.new_logprobs is not None and self.logprobs is not None:
            self._add_sampled(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None and self._wants_prompt:
            self._add_prompt(output.new_prompt_logprobs_tensors)
        elif self._wants_prompt and self.prompt_logprobs is None and output.new_token_ids:
            # A prompt of one token has no position that was predicted.
            self.prompt_logprobs = [None]

    def take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """The prompt's logprobs, once; None before they are known and ever after."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        if found is not None:
            self._wants_prompt = False
        return found

    def _add_sampled(self, rows: LogprobsLists) -> None:
        assert self.logprobs is not None
        assert self.cumulative_logprob is not None
        ids, values, ranks = _as_lists(rows)
        for row_ids, row_values, rank in zip(ids, values, ranks, strict=True):
            self.cumulative_logprob += row_values[0]
            self.logprobs.append(self._position(row_ids, row_values, rank, self._before))
            self._before = [*self._before[1 - _MAX_CHARACTER_TOKENS :], row_ids[0]]

    def _add_prompt(self, rows: LogprobsLists) -> None:
        prompt = self._prompt_token_ids
        found: list[PositionLogprobs | None] = [None]
        for index, (ids, values, rank) in enumerate(zip(*_as_lists(rows), strict=True), start=1):
            before = prompt[max(0, index - _MAX_CHARACTER_TOKENS) : index]
            found.append(self._position(ids, values, rank, before))
        self.prompt_logprobs = found

    def _position(
        self, ids: list[int], values: list[float], rank: int, before: Sequence[int]
    ) -> PositionLogprobs:
        """The chosen token, which comes first and has rank `rank`, and the best by rank."""
        texts = self._texts
        position: PositionLogprobs = {}
        for column, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            if token_id not in position:
                text = None if texts is None else texts.text_after(token_id, before)
                position[token_id] = Logprob(value, column or rank, text)
        return position


def _as_lists(rows: LogprobsLists) -> tuple[list[list[int]], list[list[float]], list[int]]:
    return (
        rows.logprob_token_ids.tolist(),
        rows.logprobs.tolist(),
        rows.sampled_token_ranks.tolist(),
    )
