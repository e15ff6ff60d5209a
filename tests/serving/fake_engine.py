"""An engine without a model: it answers a prompt with the prompt's own text, a character a token.

Some prompts make it misbehave: `!boom` (an unexpected error), `!error` (finish reason error),
`!refuse` (a validation error from the engine), `!hang` (no token until it is aborted). With
`hold()`, tokens come only as `release(n)` lets them. What stands between `!say ` and `!end` is the
answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from jubako.config import JubakoConfig
from jubako.engine.messages import EngineCoreReady
from jubako.errors import EngineDeadError, ValidationError
from jubako.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    RequestStateStats,
)
from jubako.sampling_params import RequestOutputKind, SamplingParams

BOS = 1
EOS = 2
FIRST_CHARACTER = 3
VOCAB_SIZE = FIRST_CHARACTER + 0x10000


class FakeTokenizer:
    """One token a character, behind a start-of-sequence token."""

    bos_token_id = BOS
    eos_token_id = EOS
    max_token_id = VOCAB_SIZE - 1
    chat_template: str | None = "fake"

    @property
    def backend(self) -> Any:
        return SimpleNamespace(get_vocab=lambda: {"<bos>": BOS, "<eos>": EOS, "a": 100})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [FIRST_CHARACTER + ord(c) for c in text]
        return [BOS, *ids] if add_special_tokens else ids

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def cannot_fit(self, characters: int, tokens: int) -> bool:
        return characters > tokens * 16

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        names = {BOS: "<bos>", EOS: "<eos>", 0: "<unk>"}
        return "".join(
            chr(i - FIRST_CHARACTER)
            if i >= FIRST_CHARACTER
            else ("" if skip_special_tokens else names[i])
            for i in ids
        )

    def id_to_token(self, token: int) -> str | None:
        return self.decode([token], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        if messages[0]["content"] == "!template":
            raise ValidationError("The chat template refused the messages.", "messages")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        text += "".join(f"[{k}={v}]" for k, v in kwargs.items())
        return text + ("<assistant>" if add_generation_prompt else "")


class FakeAsyncLLM:
    """What the server uses of `AsyncLLM`, without a process behind it."""

    def __init__(
        self, max_model_len: int = 64, policy: str = "fcfs", config: JubakoConfig | None = None
    ) -> None:
        config = config or JubakoConfig()
        self.config = config.replace(model_config={"max_model_len": max_model_len})
        self.tokenizer = FakeTokenizer()
        self.ready = EngineCoreReady(
            version="0",
            model="fake-model",
            architecture="Fake",
            dtype="float32",
            device="cpu",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            block_sizes=[16],
            num_gpu_blocks=100,
            kv_cache_tokens=1600,
            enable_prefix_caching=True,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            scheduling_policy=policy,
        )
        self.stat_loggers: list[Any] = []
        self.dead_error: EngineDeadError | None = None
        self.silent = False
        self.params: list[SamplingParams] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.cache_resets = 0
        self.shut_down = False
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held = False
        self._wake = asyncio.Event()
        self._permits = 0
        self.abort_requested: set[str] = set()

    # -- controls, from the test's thread -----------------------------------------------------

    def forget(self) -> None:
        """Forget what was asked so far."""
        self.params.clear()
        self.requests.clear()
        self.aborted.clear()

    def hold(self) -> None:
        """From now on tokens come only as `release` allows them."""
        self._held = True

    def release(self, tokens: int = 1_000_000) -> None:
        """Let the next `tokens` tokens, of all requests together, come."""
        self._permits += tokens
        self._rouse()

    def die(self) -> None:
        """End as a core does that was killed."""
        self.dead_error = EngineDeadError()
        self._rouse()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Wait until `condition` holds; it is looked at whenever a request begins or ends."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), "the engine never got there"

    def _rouse(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the interface of AsyncLLM ------------------------------------------------------------

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    async def check_health(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error
        if self.silent:
            raise EngineDeadError("The engine core does not answer.")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.abort_requested.update(ids)
        self._wake.set()

    async def reset_prefix_cache(self) -> bool:
        self.cache_resets += 1
        return not self.running

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.running)

    def shutdown(self) -> None:
        self.shut_down = True
        self._note()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.dead_error is not None:
            raise self.dead_error
        assert request_id is not None
        self._loop = asyncio.get_running_loop()
        ids: list[int] = prompt["prompt_token_ids"]
        if not ids:
            raise ValidationError("The prompt is empty.", "prompt")
        if min(ids) < 0 or max(ids) >= VOCAB_SIZE:
            raise ValidationError(
                f"Token id {max(ids)} is out of the vocabulary of {VOCAB_SIZE}.", "prompt"
            )
        text = self.tokenizer.decode(ids)
        if "!refuse" in text:
            raise ValidationError("logit_bias has an id out of the vocabulary.", "logit_bias")
        self.params.append(sampling_params)
        self.requests.append(
            {"id": request_id, "ids": ids, "priority": priority, "cache_salt": cache_salt}
        )
        self.running.add(request_id)
        self._note()
        ended = False
        try:
            async for output in self._outputs(request_id, ids, text, sampling_params):
                ended = output.finished
                yield output
        except EngineDeadError:
            ended = True
            raise
        finally:
            if not ended:
                self.aborted.append(request_id)
            self.running.discard(request_id)
            self._note()

    # -- the answer ---------------------------------------------------------------------------

    async def _outputs(
        self, request_id: str, ids: list[int], text: str, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        if "!boom" in text:
            raise RuntimeError("a secret at /srv/models/secret.py")
        reply = text if "!hang" not in text else text + "..." * 1000
        if "!say " in text:
            reply = text.rpartition("!say ")[2].partition("!end")[0]
        assert params.max_tokens is not None
        limit = min(params.max_tokens, len(reply))
        kind = params.output_kind
        prompt_logprobs = self._prompt_logprobs(ids, params)
        state = [_Choice() for _ in range(params.n)]
        for position in range(limit):
            if "!hang" in text:
                await self._until(lambda: False, request_id)
            await self._permit(request_id)
            aborted = request_id in self.abort_requested
            last = position == limit - 1 or aborted
            completions = []
            for index, choice in enumerate(state):
                reason = None
                if last:
                    reason = "stop" if limit == len(reply) else "length"
                    if aborted or "!error" in text:
                        reason = "abort" if aborted else "error"
                new = self._advance(choice, reply[position], params)
                whole = kind is not RequestOutputKind.DELTA
                completions.append(
                    CompletionOutput(
                        index=index,
                        text=choice.text if whole else new.text,
                        token_ids=list(choice.token_ids if whole else new.token_ids),
                        logprobs=None
                        if params.logprobs is None
                        else list(choice.logprobs if whole else new.logprobs),
                        finish_reason=reason,
                        stop_reason=None,
                    )
                )
            first = position == 0 or kind is not RequestOutputKind.DELTA
            if last or kind is not RequestOutputKind.FINAL_ONLY:
                yield RequestOutput(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=ids,
                    outputs=completions,
                    finished=last,
                    prompt_logprobs=prompt_logprobs if first else None,
                    metrics=RequestStateStats(num_generation_tokens=position + 1),
                    num_cached_tokens=len(ids) // 2,
                )
            if last:
                return

    def _advance(self, choice: _Choice, character: str, params: SamplingParams) -> _Choice:
        token = FIRST_CHARACTER + ord(character)
        new = _Choice()
        new.text = character
        new.token_ids = [token]
        new.logprobs = [self._position(token, params.logprobs or 0)]
        choice.text += new.text
        choice.token_ids += new.token_ids
        choice.logprobs += new.logprobs
        return new

    def _position(self, token: int, count: int) -> PositionLogprobs:
        """The chosen token is second best; the best is its successor; the worst impossible."""
        chosen = {token: Logprob(-1.0, 2, self.tokenizer.decode([token], False))}
        others = {
            token + 1: Logprob(-0.5, 1, self.tokenizer.decode([token + 1], False)),
            token: chosen[token],
            token + 2: Logprob(float("-inf"), 3, self.tokenizer.decode([token + 2], False)),
        }
        return chosen | dict(list(others.items())[:count])

    def _prompt_logprobs(
        self, ids: list[int], params: SamplingParams
    ) -> list[PositionLogprobs | None] | None:
        if params.prompt_logprobs is None:
            return None
        return [None, *(self._position(i, params.prompt_logprobs) for i in ids[1:])]

    async def _permit(self, request_id: str) -> None:
        await asyncio.sleep(0)
        if self._held:
            await self._until(lambda: self._permits > 0, request_id)
            self._permits -= 1
        if self.dead_error is not None:
            raise self.dead_error

    async def _until(self, condition: Callable[[], bool], request_id: str) -> None:
        while not condition():
            if self.dead_error is not None:
                raise self.dead_error
            if request_id in self.abort_requested:
                return
            self._wake.clear()
            await self._wake.wait()


class _Choice:
    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
