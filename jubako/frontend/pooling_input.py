"""Which parameters of a pooling request are right, and what do they become?"""

from __future__ import annotations

import msgspec

from jubako.config import JubakoConfig
from jubako.errors import ValidationError
from jubako.sampling_params import PoolingParams, RequestOutputKind

TASKS = ("embed", "classify", "score", "token_embed", "token_classify")
_BY_TOKEN = ("token_embed", "token_classify")
_OF_LABELS = ("classify", "score", "token_classify")


def complete_pooling_params(config: JubakoConfig, params: PoolingParams) -> PoolingParams:
    """A private copy of `params` with the task filled in: by token, where nothing is said.

    Raises `ValidationError` for what the model cannot do.
    """
    supported = config.model_config.supported_tasks
    task = params.task
    if task is None:
        task = next((t for t in _BY_TOKEN if t in supported), supported[0])
    _check_task(task, supported)
    _check_dimensions(config, params.dimensions, task)
    _check_switch("use_activation", params.use_activation)
    _check_steps(config, params, task)
    skip = params.skip_reading_prefix_cache
    if task in _BY_TOKEN:
        # A token that is not computed has no hidden state to answer with.
        skip = True
    return msgspec.structs.replace(
        params,
        task=task,
        skip_reading_prefix_cache=skip,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _check_task(task: object, supported: tuple[str, ...]) -> None:
    if task not in TASKS:
        raise ValidationError(
            f"task must be one of {', '.join(TASKS)}, got {task!r}.", "task", task
        )
    if task not in supported:
        raise ValidationError(
            f"This model cannot be asked to {task}; it supports {', '.join(supported)}.",
            "task",
            task,
            code="unsupported_task",
        )


def _check_dimensions(config: JubakoConfig, dimensions: object, task: str) -> None:
    if dimensions is None:
        return
    pooler = config.pooler_config
    if task in _OF_LABELS:
        raise ValidationError(
            "dimensions is for embeddings; leave it out.", "dimensions", dimensions
        )
    if type(dimensions) is not int or not 1 <= dimensions <= pooler.embedding_size:
        raise ValidationError(
            f"dimensions must be an integer from 1 to {pooler.embedding_size}, got {dimensions!r}.",
            "dimensions",
            dimensions,
        )
    if dimensions == pooler.embedding_size:
        return
    if not pooler.is_matryoshka:
        raise ValidationError(
            f"dimensions must be {pooler.embedding_size}, got {dimensions}: this model was not "
            "trained to have its embeddings cut (start the engine with is_matryoshka if it was).",
            "dimensions",
            dimensions,
        )
    known = pooler.matryoshka_dimensions
    if known and dimensions not in known:
        raise ValidationError(
            f"dimensions must be one of {', '.join(map(str, known))}, got {dimensions}.",
            "dimensions",
            dimensions,
        )


def _check_steps(config: JubakoConfig, params: PoolingParams, task: str) -> None:
    tag, chosen = params.step_tag_id, params.returned_token_ids
    if tag is not None and (type(tag) is not int or task not in _BY_TOKEN):
        raise ValidationError(
            f"step_tag_id must be a token id, and is for tasks by token; got {tag!r}.",
            "step_tag_id",
            tag,
        )
    if chosen is None:
        return
    limit = config.pooler_config.num_labels
    valid = isinstance(chosen, list) and all(type(i) is int and 0 <= i < limit for i in chosen)
    if not valid:
        raise ValidationError(
            f"returned_token_ids must be numbers of scores, 0 to {limit - 1}."
            if limit
            else "returned_token_ids is for models with scores; leave it out.",
            "returned_token_ids",
            chosen,
        )


def _check_switch(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ValidationError(f"{name} must be true or false, got {value!r}.", name, value)
