"""How does a Python program get vectors and scores from a model?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jubako.errors import EngineGenerateError, ValidationError
from jubako.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    viewed,
)
from jubako.sampling_params import PoolingParams

if TYPE_CHECKING:
    from jubako.frontend.llm_engine import LLMEngine

Prompts = str | Sequence[Any] | Mapping[str, Any]
"""A prompt or a list of them, as for `LLM.generate`."""

Progress = bool | Callable[..., Any]


class PoolingMethods:
    """What `LLM` offers for models that pool. Each call accepts all its prompts or none.

    A prompt may be as long as the context; `truncate_prompt_tokens` in the parameters cuts longer
    ones, -1 to the context. Raises `ValidationError` for what the model cannot do, and
    `EngineGenerateError` if a request fails in the engine.
    """

    llm_engine: LLMEngine

    def _pool(
        self, prompts: Prompts, params: Any, use_tqdm: Progress
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Run one request for each prompt; in `LLM`."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Progress = True,
        *,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool every prompt; `outputs.data` is a float32 array.

        The task is `pooling_task`, or that of the parameters; without either it is one by token.
        """
        outputs = self._pool(prompts, _with_task(pooling_params, pooling_task), use_tqdm)
        for output in outputs:
            if output.outputs is None:
                raise EngineGenerateError(output.error or "The engine could not finish a request.")
        return outputs

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Progress = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for every prompt: `outputs.embedding`."""
        outputs = self.encode(prompts, pooling_params, use_tqdm, pooling_task="embed")
        return [viewed(output, EmbeddingOutput) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Progress = True,
    ) -> list[ClassificationRequestOutput]:
        """The labels' scores for every prompt: `outputs.probs`."""
        outputs = self.encode(prompts, pooling_params, use_tqdm, pooling_task="classify")
        return [viewed(output, ClassificationOutput) for output in outputs]

    def reward(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Progress = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """A reward model's scores: `outputs.data`, by token if it scores tokens."""
        tasks = self.llm_engine.ready.supported_tasks
        task = "token_classify" if "token_classify" in tasks else "classify"
        return self.encode(prompts, pooling_params, use_tqdm, pooling_task=task)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit: one of `data_1` with each of `data_2`, or each with its own.

        A classifier with one label reads a pair as one prompt; of a model that embeds, the score
        is the cosine of the angle between the vectors. `outputs.score` has it.
        """
        from jubako.frontend.scoring import make_pairs, pair_params, scoring_kind

        params = pooling_params or PoolingParams()
        kind = scoring_kind(self.llm_engine.ready.supported_tasks)
        pairs = make_pairs(data_1, data_2, ("data_1", "data_2"))
        if kind == "embeddings":
            return self._score_by_embeddings(pairs, params, use_tqdm)
        prompts, all_params = [], []
        for first, second in pairs:
            ids, second_segment = self.llm_engine.encode_pair(
                first, second, params.truncate_prompt_tokens
            )
            prompts.append({"prompt_token_ids": ids})
            all_params.append(pair_params(params, second_segment))
        outputs = self.encode(prompts, all_params, use_tqdm)
        return [viewed(output, ScoringOutput) for output in outputs]

    def _score_by_embeddings(
        self, pairs: list[tuple[str, str]], params: PoolingParams, use_tqdm: Progress
    ) -> list[ScoringRequestOutput]:
        from jubako.frontend.scoring import cosine

        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        outputs = self.encode(texts, params, use_tqdm, pooling_task="embed")
        by_text = dict(zip(texts, outputs, strict=True))
        scores = []
        for first, second in pairs:
            a, b = by_text[first], by_text[second]
            assert a.outputs is not None
            assert b.outputs is not None
            scores.append(
                ScoringRequestOutput(
                    request_id=f"{a.request_id}_{b.request_id}",
                    outputs=ScoringOutput(score=cosine(a.outputs.data, b.outputs.data)),
                    prompt_token_ids=[*a.prompt_token_ids, *b.prompt_token_ids],
                    num_cached_tokens=a.num_cached_tokens + b.num_cached_tokens,
                )
            )
        return scores


def _with_task(params: Any, task: str | None) -> Any:
    """The parameters with the task of the call; other kinds are left for whoever checks them."""
    if params is None:
        return PoolingParams(task=task)
    if isinstance(params, PoolingParams):
        if task is None or params.task == task:
            return params
        if params.task is not None:
            raise ValidationError(
                f"The parameters ask for task={params.task!r}, and the call is for {task!r}.",
                "pooling_params",
            )
        return msgspec.structs.replace(params, task=task)
    if isinstance(params, Sequence) and not isinstance(params, str):
        return [_with_task(param, task) for param in params]
    return params
