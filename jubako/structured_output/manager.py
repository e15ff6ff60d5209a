"""How do the grammars of an engine's requests come about, and who keeps them?

A grammar is compiled in a thread of a small pool, once however many requests have it, together with
its first mask, which is the dearest. Each request then has a copy of its own that goes on by the
request's tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jubako.errors import EngineGenerateError, UnsupportedModelError, ValidationError
from jubako.sampling_params import StructuredOutputsParams
from jubako.scheduler.request import Request
from jubako.structured_output.grammars import grammar_of, limits
from jubako.structured_output.matcher import Matcher, Words
from jubako.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_SECONDS = 30.0
"""How long a grammar may take to be compiled, the wait for a thread included."""
_THREADS = 2
_KEPT = 32
"""Compiled grammars that are kept for requests to come."""


class _Compilation:
    """A grammar that is being compiled or has been, and how many requests wait for it."""

    def __init__(self, future: Future[LLMatcher]) -> None:
        self.future = future
        self.waiting = 0


class _Wait:
    """A request that waits for its grammar."""

    def __init__(self, key: bytes, compilation: _Compilation) -> None:
        self.key = key
        self.compilation = compilation
        self.deadline = time.monotonic() + MAX_SECONDS


class StructuredOutputManager:
    """Grammars of an engine: see `jubako.scheduler.protocols.StructuredOutputManager`.

    `read_vocabulary` is called when the first grammar is compiled, in another thread. `vocab_size`
    is the model's. What belongs to a request is its `structured_output`.
    """

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._read_vocabulary = read_vocabulary
        self._num_words = -(-vocab_size // 32)
        self._eos = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._compilations: OrderedDict[bytes, _Compilation] = OrderedDict()
        self._waits: dict[str, _Wait] = {}
        self._ready: deque[str] = deque()

    # -- compilation --------------------------------------------------------------------------

    def is_ready(self, request: Request) -> bool:
        """Whether the request's grammar is compiled; the first time, compilation begins.

        Raises `ValidationError` if it cannot be compiled or takes too long.
        """
        state = request.structured_output
        if isinstance(state, Matcher):
            return True
        wait = self._waits.get(request.request_id)
        if wait is None:
            wait = self._begin(request)
        future = wait.compilation.future
        if not future.done():
            if time.monotonic() <= wait.deadline:
                return False
            self._forget(request.request_id)
            raise ValidationError(
                f"structured_outputs took more than {MAX_SECONDS:.0f} s to compile; use a simpler "
                "form, or try again when the engine has less to do.",
                "structured_outputs",
            )
        del self._waits[request.request_id]
        wait.compilation.waiting -= 1
        request.structured_output = Matcher(future.result().deep_copy(), self._eos)
        return True

    def _begin(self, request: Request) -> _Wait:
        assert request.sampling_params is not None
        params = request.sampling_params.structured_outputs
        assert params is not None
        key = msgspec.msgpack.encode(params)
        compilation = self._compilations.get(key)
        if compilation is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
            compilation = _Compilation(self._pool.submit(self._compile, params))
            self._compilations[key] = compilation
            self._drop_oldest()
        self._compilations.move_to_end(key)
        compilation.waiting += 1
        wait = self._waits[request.request_id] = _Wait(key, compilation)
        request_id = request.request_id

        def note(future: Future[LLMatcher]) -> None:
            self._ready.append(request_id)

        compilation.future.add_done_callback(note)
        return wait

    def _drop_oldest(self) -> None:
        for key in list(self._compilations)[: max(0, len(self._compilations) - _KEPT)]:
            if not self._compilations[key].waiting:
                del self._compilations[key]

    def take_ready(self) -> Iterable[str]:
        """Ids of requests whose wait has ended since the last call, in whatever way."""
        ready: list[str] = []
        while self._ready:
            ready.append(self._ready.popleft())
        if self._waits:
            now = time.monotonic()
            ready += [i for i, wait in self._waits.items() if now > wait.deadline]
        return ready

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher

        grammar = grammar_of(params)
        matcher = LLMatcher(self._get_tokenizer(), grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error() and not any(mask):
                raise ValidationError(
                    "structured_outputs cannot be written with this model's vocabulary.",
                    "structured_outputs",
                )
        if matcher.is_error():
            problem = matcher.get_error().partition("\n")[0]
            raise ValidationError(
                f"structured_outputs cannot be compiled: {problem}.", "structured_outputs"
            )
        return matcher

    def _get_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                from jubako.structured_output.tokenizer import make_tokenizer

                if not self._eos:
                    raise UnsupportedModelError(
                        "Structured outputs need a model that has an end-of-sequence token."
                    )
                began = time.perf_counter()
                self._tokenizer = make_tokenizer(self._read_vocabulary(), sorted(self._eos))
                logger.debug("Vocabulary for grammars: %.2f s", time.perf_counter() - began)
            return self._tokenizer

    # -- steps --------------------------------------------------------------------------------

    def grammar_bitmask(
        self, requests: Sequence[Request], drafts: Mapping[str, list[int]]
    ) -> Words:
        """Allowed tokens, `1 + drafts` rows a request, in order."""
        proposed = [drafts.get(request.request_id, []) for request in requests]
        mask = np.empty((len(requests) + sum(map(len, proposed)), self._num_words), np.int32)
        start = 0
        for request, tokens in zip(requests, proposed):
            end = start + 1 + len(tokens)
            self._matcher(request).fill(mask[start:end], tokens)
            start = end
        return mask

    def accept_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were kept."""
        self._matcher(request).accept(token_ids)

    def validate_drafts(self, request: Request, token_ids: list[int]) -> list[int]:
        """The drafts before the first that the grammar refuses."""
        return token_ids[: self._matcher(request).num_allowed(token_ids)]

    def _matcher(self, request: Request) -> Matcher:
        matcher = request.structured_output
        if not isinstance(matcher, Matcher):
            raise EngineGenerateError("The request has no grammar.")
        return matcher

    # -- ends ---------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """The request has ended. Nobody else waits for its grammar: it is not compiled."""
        request.structured_output = None
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return
        compilation = wait.compilation
        compilation.waiting -= 1
        if not compilation.waiting and not compilation.future.done():
            compilation.future.cancel()
            if self._compilations.get(wait.key) is compilation:
                del self._compilations[wait.key]

    def shutdown(self) -> None:
        """Compile nothing more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
