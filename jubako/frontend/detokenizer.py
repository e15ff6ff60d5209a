"""What text has been generated so far, and how much of it may be shown?

Tokens are bytes (`token_bytes`); an incremental UTF-8 decoder turns them into characters, so that
no text ever ends inside one. Stop strings are looked for where text was added, and as much text is
held back as could be the beginning of one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from jubako.frontend.token_bytes import TokenBytes
from jubako.frontend.tokenizer import Tokenizer
from jubako.sampling_params import SamplingParams

_utf8_decoder = codecs.getincrementaldecoder("utf-8")

MAX_UTF8_BYTES = 4


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalDetokenizer:
    """The detokeniser of one request; one that makes no text where none is wanted."""
    if tokenizer is None or not params.detokenize:
        return IncrementalDetokenizer()
    return TextDetokenizer(tokenizer, prompt_token_ids, params)


class IncrementalDetokenizer:
    """Collects token ids and makes no text: for requests without a tokeniser or `detokenize`."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def output_text(self) -> str:
        """All text so far, without what follows or belongs to a stop string that was found."""
        return ""

    def num_output_tokens(self) -> int:
        """Generated tokens so far, also those that added no text."""
        return len(self.token_ids)

    def update(self, new_ids: Sequence[int], stop_terminated: bool) -> str | None:
        """Take new ids; returns the stop string that they complete, or None.

        `stop_terminated` says that the engine ended the request at the last of them, a stop token.
        """
        self.token_ids.extend(new_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text to show: all of it, or with `delta` what is new since the last call.

        Until `finished`, text that could be the beginning of a stop string is held back.
        """
        return ""


class TextDetokenizer(IncrementalDetokenizer):
    """Makes text as tokens come, and finds stop strings.

    Where several stop strings are in new text, the one that starts first is taken, of those that
    start together the longest. Bytes at the very end that are no whole character become U+FFFD when
    the request finishes.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        super().__init__()
        self._stop = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held_back = params.output_text_buffer_length
        self._text = ""
        self._shown = 0
        self._ended = False
        self._decoder = _token_decoder(tokenizer, prompt_token_ids, params.skip_special_tokens)

    @property
    def output_text(self) -> str:
        return self._text

    def update(self, new_ids: Sequence[int], stop_terminated: bool) -> str | None:
        if not new_ids or self._ended:
            self.token_ids.extend(new_ids)
            return None
        readable = new_ids[:-1] if stop_terminated and not self._include_stop else new_ids
        decode = self._decoder.decode
        # A local name as the only owner lets the interpreter append in place.
        text, self._text = self._text, ""
        search_from = len(text)
        count = len(self.token_ids)
        for token_id in readable:
            text += decode(token_id)
            count += 1
            if count <= self._min_tokens:
                search_from = len(text)
        self._text = text
        self.token_ids.extend(new_ids)
        if self._stop and len(self.token_ids) > self._min_tokens:
            return self._cut_at_stop(search_from)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        if finished and not self._ended:
            self._ended = True
            self._text += self._decoder.finish()
        end = len(self._text) if finished else max(0, len(self._text) - self._held_back)
        if not delta:
            return self._text[:end]
        start = self._shown
        if end <= start:
            return ""
        self._shown = end
        return self._text[start:end]

    def _cut_at_stop(self, search_from: int) -> str | None:
        """End the text at a stop string that reaches beyond `search_from`, if there is one."""
        text = self._text
        if search_from == len(text):
            return None
        found: tuple[int, int] | None = None
        stop_string = None
        for candidate in self._stop:
            at = text.find(candidate, max(0, search_from - len(candidate) + 1))
            if at >= 0 and (found is None or (at, -len(candidate)) < found):
                found = at, -len(candidate)
                stop_string = candidate
        if found is None:
            return None
        start, negative_length = found
        self._text = text[: start - negative_length if self._include_stop else start]
        self._ended = True
        return stop_string


class _TokenDecoder(Protocol):
    def decode(self, token_id: int) -> str:
        """The characters that the token completes."""

    def finish(self) -> str:
        """What is left of a character that was never completed."""


def _token_decoder(
    tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
) -> _TokenDecoder:
    if tokenizer.token_bytes is None:
        return _StreamDecoder(tokenizer, prompt, skip_special_tokens)
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    return _ByteDecoder(tokenizer.token_bytes, prompt, skipped)


class _ByteDecoder:
    """Decodes tokens that stand for bytes.

    The end of the prompt matters twice: it may hold the first bytes of a character, and only a text
    that begins with the output loses SentencePiece's leading space.
    """

    def __init__(self, table: TokenBytes, prompt: Sequence[int], skipped: frozenset[int]) -> None:
        self._table = table
        self._bytes = table.table
        self._skipped = skipped
        self._utf8 = _utf8_decoder("replace")
        tail = b""
        for token_id in reversed(prompt):
            if token_id not in skipped:
                tail = table[token_id] + tail
                if len(tail) >= MAX_UTF8_BYTES:
                    break
        self._utf8.decode(tail)
        self._strip = table.strips_space and not tail

    def decode(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._table[token_id]
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class _StreamDecoder:
    """Decodes with the library's `DecodeStream`: for decoders that need a token's neighbours."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = _readable_suffix(tokenizer, prompt, skip_special_tokens)
        self._pending: list[int] = []
        self._stream = DecodeStream(self._context, skip_special_tokens)

    def decode(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except OverflowError:
            return ""
        except Exception:
            # The text before has changed with the new token; go on from here without it.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            text = self._stream.step(self._tokenizer.backend, token_id)
        if text is None:
            return ""
        self._context = (self._context + self._pending)[-MAX_CONTEXT_TOKENS:]
        self._pending = []
        return str(text)

    def finish(self) -> str:
        if not self._pending:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._context, self._skip)
        return decode([*self._context, *self._pending], self._skip)[len(before) :]


MIN_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS = 4, 23


def _readable_suffix(
    tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
) -> list[int]:
    """The shortest end of the prompt, 4 to 23 tokens, that is whole characters; else all of it."""
    if len(prompt) > MIN_CONTEXT_TOKENS:
        for length in range(MIN_CONTEXT_TOKENS, min(MAX_CONTEXT_TOKENS, len(prompt)) + 1):
            suffix = list(prompt[-length:])
            if "\ufffd" not in tokenizer.decode(suffix, skip_special_tokens):
                return suffix
    return list(prompt)
