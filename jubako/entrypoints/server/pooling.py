"""How are the endpoints for vectors and scores answered?

Each has a `prepare`, which checks the request and tokenises it, and an `answer`.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from jubako.entrypoints.server.exchange import settle
from jubako.entrypoints.server.generation import check_model
from jubako.entrypoints.server.pooling_protocol import (
    Classification,
    ClassificationRequest,
    ClassificationResponse,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    Pooled,
    PoolingBase,
    PoolingRequest,
    PoolingResponse,
    PoolingUsage,
)
from jubako.entrypoints.server.prompts import split_prompts
from jubako.entrypoints.server.state import ServerState
from jubako.errors import EngineGenerateError, ValidationError
from jubako.outputs import PoolingOutput, PoolingRequestOutput
from jubako.sampling_params import PoolingParams

Result = PoolingRequestOutput[PoolingOutput]
Job = tuple[Any, PoolingParams]
"""A prompt and its parameters."""


def check_task(state: ServerState, *tasks: str) -> None:
    """Raise `unsupported_task` unless the model can do one of `tasks`."""
    supported = state.engine.ready.supported_tasks
    if not set(tasks) & set(supported):
        raise ValidationError(
            f"The model {state.model_name!r} does not support this endpoint; it supports "
            f"{', '.join(supported)}.",
            "model",
            code="unsupported_task",
        )


class PoolingExchange:
    """One request for vectors or scores, which is one engine request for each of its prompts."""

    id_prefix = "pool"
    parameter = "input"
    """The field that has the prompts."""

    def __init__(self, state: ServerState, request: PoolingBase, request_id: str) -> None:
        self.state = state
        self.base = request
        self.id = f"{self.id_prefix}-{request_id}"
        self.created = int(time.time())
        self.jobs: list[Job] = []

    async def prepare(self) -> None:
        """Check the request and tokenise its prompts."""
        raise NotImplementedError

    async def answer(self) -> msgspec.Struct:
        """The response."""
        raise NotImplementedError

    def admit(self) -> Callable[[], None]:
        """Take places for all engine requests; the result gives them back."""
        tokens = sum(len(prompt["prompt_token_ids"]) for prompt, _ in self.jobs)
        return self.state.admission.admit(len(self.jobs), tokens, self.parameter)

    def check_common(self) -> None:
        """What holds for all of them, beyond the types of the fields."""
        check_model(self.state, self.base.model)
        keep, longest = self.base.truncate_prompt_tokens, self.state.max_model_len
        if keep is not None and keep != -1 and not 1 <= keep <= longest:
            raise ValidationError(
                f"truncate_prompt_tokens={keep} must be -1, or 1 to {longest}.",
                "truncate_prompt_tokens",
                keep,
            )

    def split_input(self, given: Any) -> list[str | list[int]]:
        """The prompts in `input`, as in the `prompt` field of completions."""
        try:
            prompts = split_prompts(given)
        except ValidationError as error:
            error.message = error.message.replace("prompt", "input", 1)
            error.parameter = "input"
            raise
        self.state.admission.check_size(len(prompts), 0, "input")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValidationError(f"input[{i}] is empty.", "input", prompt)
        return prompts

    async def add_prompts(self, prompts: list[str | list[int]], params: PoolingParams) -> None:
        """One job for each prompt."""
        engine = self.state.engine
        special = self.base.add_special_tokens is not False
        try:
            encoded = await engine.encode_prompts(prompts, params.truncate_prompt_tokens, special)
        except ValidationError as error:
            error.parameter = self.parameter if error.parameter == "prompt" else error.parameter
            raise
        self.jobs += [({"prompt_token_ids": ids}, params) for ids in encoded]

    # -- running ------------------------------------------------------------------------------

    async def run(self) -> list[Result]:
        """All results, in order. The first failure, and a cancellation, abort the rest."""
        tasks = [asyncio.ensure_future(self._run_one(i)) for i in range(len(self.jobs))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                await settle(task)

    async def _run_one(self, index: int) -> Result:
        prompt, params = self.jobs[index]
        request_id = self.id if len(self.jobs) == 1 else f"{self.id}-{index}"
        source = self.state.engine.encode(
            prompt,
            params,
            request_id,
            priority=self.base.priority or 0,
            cache_salt=self.base.cache_salt,
        )
        async with aclosing(self.state.running(request_id, source)) as outputs:
            async for output in outputs:
                return self._checked(output)
        raise EngineGenerateError("The engine gave no answer to this request.")

    def _checked(self, output: Result) -> Result:
        if output.outputs is None:
            if output.finish_reason == "abort":
                self.state.check_accepting()
                raise EngineGenerateError("The request was aborted before it was finished.")
            raise EngineGenerateError("The engine could not finish this request.")
        return output

    @staticmethod
    def usage(results: list[Result]) -> PoolingUsage:
        """Tokens of all prompts."""
        tokens = sum(len(result.prompt_token_ids) for result in results)
        return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


def data_of(result: Result) -> np.ndarray[Any, Any]:
    """The numbers of a result that has been checked."""
    assert result.outputs is not None
    return result.outputs.data


def _encoded(data: np.ndarray[Any, Any], encoding_format: str | None) -> Any:
    if encoding_format == "base64":
        return base64.b64encode(data.astype("<f4").tobytes()).decode()
    return data.tolist()


class EmbeddingExchange(PoolingExchange):
    """/v1/embeddings."""

    id_prefix = "embd"

    def __init__(self, state: ServerState, request: EmbeddingRequest, request_id: str) -> None:
        super().__init__(state, request, request_id)
        self.request = request

    async def prepare(self) -> None:
        """Check the request and tokenise its prompts."""
        check_task(self.state, "embed")
        self.check_common()
        request = self.request
        params = PoolingParams(
            task="embed",
            dimensions=request.dimensions,
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        await self.add_prompts(self.split_input(request.input), params)

    async def answer(self) -> EmbeddingResponse:
        """The response, in OpenAI's shape."""
        results = await self.run()
        return EmbeddingResponse(
            data=[
                Embedding(
                    index=i, embedding=_encoded(data_of(result), self.request.encoding_format)
                )
                for i, result in enumerate(results)
            ],
            model=self.state.model_name,
            usage=self.usage(results),
        )


class AnyPoolingExchange(PoolingExchange):
    """/pooling."""

    def __init__(self, state: ServerState, request: PoolingRequest, request_id: str) -> None:
        super().__init__(state, request, request_id)
        self.request = request

    async def prepare(self) -> None:
        """Check the request and tokenise its prompts."""
        check_task(self.state, "embed", "classify", "score", "token_embed", "token_classify")
        self.check_common()
        request = self.request
        params = PoolingParams(
            task=request.task,
            dimensions=request.dimensions,
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        await self.add_prompts(self.split_input(request.input), params)

    async def answer(self) -> PoolingResponse:
        """The response."""
        results = await self.run()
        return PoolingResponse(
            id=self.id,
            created=self.created,
            model=self.state.model_name,
            data=[
                Pooled(index=i, data=_encoded(data_of(result), self.request.encoding_format))
                for i, result in enumerate(results)
            ],
            usage=self.usage(results),
        )


class ClassificationExchange(PoolingExchange):
    """/classify."""

    id_prefix = "classify"

    def __init__(self, state: ServerState, request: ClassificationRequest, request_id: str) -> None:
        super().__init__(state, request, request_id)
        self.request = request

    async def prepare(self) -> None:
        """Check the request and tokenise its prompts."""
        check_task(self.state, "classify")
        self.check_common()
        request = self.request
        params = PoolingParams(
            task="classify",
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        await self.add_prompts(self.split_input(request.input), params)

    async def answer(self) -> ClassificationResponse:
        """The response."""
        results = await self.run()
        labels = self.state.engine.config.pooler_config.labels
        data = []
        for i, result in enumerate(results):
            probs = data_of(result)
            best = int(probs.argmax())
            data.append(
                Classification(
                    index=i,
                    label=labels[best] if best < len(labels) else None,
                    probs=probs.tolist(),
                    num_classes=len(probs),
                )
            )
        return ClassificationResponse(
            id=self.id,
            created=self.created,
            model=self.state.model_name,
            data=data,
            usage=self.usage(results),
        )
