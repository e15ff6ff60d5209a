"""How does a step of a model that pools end, and what else goes into it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jubako.config import JubakoConfig
from jubako.sampling.pooler import Pooler
from jubako.sampling.pooling_metadata import PoolingCursor, PoolingMetadata, PoolingStates
from jubako.sampling_params import SamplingParams
from jubako.scheduler.model_output import ModelRunnerOutput
from jubako.worker.input_batch import InputBatch
from jubako.worker.request_state import CachedRequestState
from jubako.worker.step_inputs import StepInputs

NEUTRAL_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""For the batch's fields of sampling, which nobody reads."""


class PoolingStep:
    """Pools a step's hidden states, and tells the model of segments."""

    def __init__(self, config: JubakoConfig, model: Any, device: torch.device) -> None:
        self._pooler = Pooler(config.pooler_config, getattr(model, "compute_scores", None))
        self._takes_token_types = bool(getattr(model, "takes_token_types", False))
        self._device = device

    def model_inputs(
        self,
        batch: InputBatch,
        requests: Mapping[str, CachedRequestState],
        inputs: StepInputs,
    ) -> dict[str, Tensor]:
        """What the model gets beside ids and positions: `token_type_ids` [T], if any is not 0."""
        if not self._takes_token_types:
            return {}
        firsts = [_second_segment(requests[req_id]) for req_id in batch.req_ids]
        if all(first is None for first in firsts):
            return {}
        starts = inputs.query_start_loc[: batch.num_reqs + 1]
        types = np.zeros(int(starts[-1]), dtype=np.int32)
        for row, first in enumerate(firsts):
            if first is not None:
                types[int(starts[row]) + first : int(starts[row + 1])] = 1
        return {"token_type_ids": torch.from_numpy(types).to(self._device)}

    def output(
        self,
        batch: InputBatch,
        requests: Mapping[str, CachedRequestState],
        inputs: StepInputs,
        hidden: Tensor,
    ) -> ModelRunnerOutput:
        """The outputs of the rows whose prompt is complete."""
        rows: Sequence[CachedRequestState] = [requests[req_id] for req_id in batch.req_ids]
        n = len(rows)
        starts = inputs.query_start_loc[: n + 1].astype(np.int64)
        metadata = PoolingMetadata(
            prompt_lens=batch.num_prompt_tokens[:n].astype(np.int64),
            prompt_token_ids=[request.prompt_token_ids for request in rows],
            pooling_params=[_pooling_params(request) for request in rows],
            pooling_states=[_pooling_states(request) for request in rows],
            cursor=PoolingCursor(
                starts[:-1], starts[1:], batch.num_computed_tokens_cpu[:n].astype(np.int64)
            ),
        )
        return ModelRunnerOutput(
            req_ids=list(batch.req_ids),
            req_id_to_index=dict(batch.req_id_to_index),
            sampled_token_ids=[[] for _ in range(n)],
            pooler_output=list(self._pooler(hidden, metadata)),
        )


def _pooling_params(request: CachedRequestState) -> Any:
    assert request.pooling_params is not None, "a pooling model runs pooling requests only"
    return request.pooling_params


def _pooling_states(request: CachedRequestState) -> PoolingStates:
    assert request.pooling_states is not None, "they come with the pooling parameters"
    return request.pooling_states


def _second_segment(request: CachedRequestState) -> int | None:
    """The first position of a pair's second text."""
    extra = _pooling_params(request).extra_kwargs or {}
    first = extra.get("compressed_token_type_ids")
    return first if isinstance(first, int) else None
