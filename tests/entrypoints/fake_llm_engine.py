"""An `LLMEngine` without a model: it answers a prompt with the prompt, a character a token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from jubako.config import JubakoConfig
from jubako.errors import EngineDeadError, ValidationError
from jubako.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jubako.sampling_params import RequestOutputKind, SamplingParams
from tests.serving.fake_engine import FakeTokenizer


class FakeLLMEngine:
    """Finishes requests last come, first served, so that order has to be restored."""

    instances: ClassVar[list[FakeLLMEngine]] = []

    def __init__(self, config: JubakoConfig, *, multiprocess: bool = False) -> None:
        self.config = config.replace(
            model_config={"generation_config": {"temperature": 0.5, "top_k": 64}}
        )
        self.multiprocess = multiprocess
        self.tokenizer = FakeTokenizer()
        self.requests: dict[str, tuple[Any, str, SamplingParams, int]] = {}
        self.seen: list[tuple[Any, SamplingParams, int]] = []
        self.aborted: list[str] = []
        self.steps = 0
        self.fail_at_step: dict[int, BaseException] = {}
        self.shut_down = False
        self.progress: dict[str, int] = {}
        FakeLLMEngine.instances.append(self)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> str:
        text = prompt
        if isinstance(prompt, dict):
            text = prompt.get("prompt") or self.tokenizer.decode(prompt["prompt_token_ids"])
        elif not isinstance(prompt, str):
            text = self.tokenizer.decode(prompt)
        if text == "":
            raise ValidationError("The prompt is empty; it must have at least one token.", "prompt")
        if len(text) > 100:
            raise ValidationError(
                "The prompt is too long.", "prompt", code="context_length_exceeded"
            )
        self.requests[request_id] = (prompt, text, params, priority)
        self.progress[request_id] = 0
        self.seen.append((prompt, params, priority))
        return request_id

    def abort_request(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self.aborted.append(request_id)
            self.requests.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.steps in self.fail_at_step:
            raise self.fail_at_step.pop(self.steps)
        outputs = []
        for request_id in list(reversed(self.requests)):
            output = self._advance(request_id)
            if output is not None:
                outputs.append(output)
        return outputs

    def _advance(self, request_id: str) -> RequestOutput | None:
        _, text, params, _ = self.requests[request_id]
        limit = min(len(text), params.max_tokens or len(text))
        self.progress[request_id] += 1
        done = self.progress[request_id]
        last = done >= limit
        if last:
            del self.requests[request_id]
        delta = params.output_kind is RequestOutputKind.DELTA
        if not last and params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        shown = text[done - 1 : done] if delta else text[:done]
        ids = self.tokenizer.encode(shown, add_special_tokens=False)
        logprobs = None
        if params.logprobs is not None:
            logprobs = [{i: Logprob(float("-inf"), 1, c)} for i, c in zip(ids, shown)]
        return RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=self.tokenizer.encode(text),
            outputs=[
                CompletionOutput(
                    index=i,
                    text=shown,
                    token_ids=ids,
                    logprobs=logprobs,
                    finish_reason=("stop" if limit == len(text) else "length") if last else None,
                )
                for i in range(params.n)
            ],
            finished=last,
            metrics=RequestStateStats(
                queued_ts=1.0,
                scheduled_ts=1.5,
                first_token_ts=2.0,
                last_token_ts=3.0,
                first_token_latency=1.25,
                num_generation_tokens=done,
            ),
            num_cached_tokens=2,
        )

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def get_metrics(self) -> dict[str, Any]:
        return {"generation_tokens": 5}

    def shutdown(self) -> None:
        self.shut_down = True


def dead() -> EngineDeadError:
    return EngineDeadError()
