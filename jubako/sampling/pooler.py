"""From hidden states to the vectors and scores that requests ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jubako.config.pooler import PoolerConfig
from jubako.sampling.pooling_metadata import PoolingMetadata
from jubako.sampling_params import PoolingParams

Result = np.ndarray[Any, np.dtype[np.float32]]

BY_TOKEN_TASKS = ("token_embed", "token_classify")
"""Tasks with an output for every token."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "tanh": torch.tanh,
}


class Pooler:
    """The pooling of one model. `compute_scores` is a classifier's: [r, h] → [r, labels]."""

    def __init__(
        self, config: PoolerConfig, compute_scores: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.config = config
        self._compute_scores = compute_scores if config.num_labels else None
        self._activation = _ACTIVATIONS[config.activation]

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Result | None]:
        """Hidden states [T, h] → one output a row; None where the prompt is not complete.

        The output is float32: [size] for a task on the whole prompt, [tokens, size] for one by
        token.
        """
        results: list[Result | None] = [None] * len(metadata.prompt_lens)
        whole = []
        finished = set(metadata.finished_rows().tolist())
        for row, params in enumerate(metadata.pooling_params):
            if params.task not in BY_TOKEN_TASKS:
                if row in finished:
                    whole.append(row)
                continue
            states = self._all_states(hidden, metadata, row)
            if row in finished:
                states = self._chosen_tokens(states, metadata, row)
                results[row] = _to_host(self._outputs(states, params))
        if whole:
            rows = np.array(whole)
            outputs = self._pooled_outputs(
                self._pooled(hidden, metadata, rows), [metadata.pooling_params[r] for r in whole]
            )
            for row, output in zip(whole, outputs, strict=True):
                results[row] = output
        return results

    # -- whole prompts ------------------------------------------------------------------------

    def _pooled(self, hidden: Tensor, metadata: PoolingMetadata, rows: np.ndarray) -> Tensor:
        """[r, h]."""
        cursor, kind = metadata.cursor, self.config.pooling_type
        if kind == "MEAN":
            mean = metadata.mean(hidden, rows)
            return mean if self._compute_scores is None else mean.to(hidden.dtype)
        places = cursor.starts[rows] if kind == "CLS" else cursor.ends[rows] - 1
        return hidden[torch.from_numpy(places.astype(np.int64)).to(hidden.device)]

    def _pooled_outputs(self, pooled: Tensor, params: list[PoolingParams]) -> list[Result]:
        """All rows at once where they ask for the same."""
        alike = all(
            (p.dimensions, p.use_activation) == (params[0].dimensions, params[0].use_activation)
            for p in params
        )
        if alike:
            return list(_to_host(self._outputs(pooled, params[0])))
        return [
            _to_host(self._outputs(pooled[i : i + 1], param))[0] for i, param in enumerate(params)
        ]

    # -- every token --------------------------------------------------------------------------

    def _all_states(self, hidden: Tensor, metadata: PoolingMetadata, row: int) -> Tensor:
        """Hidden states of the row's prompt so far, [prompt, h]."""
        cursor = metadata.cursor
        own = hidden[int(cursor.starts[row]) : int(cursor.ends[row])]
        states = metadata.pooling_states[row]
        return states.add(own, int(cursor.computed[row]), int(metadata.prompt_lens[row]))

    def _chosen_tokens(self, states: Tensor, metadata: PoolingMetadata, row: int) -> Tensor:
        """Those of the tokens that end a step, where the request or the model names one."""
        tag = metadata.pooling_params[row].step_tag_id
        if tag is None and self.config.pooling_type == "STEP":
            tag = self.config.step_tag_id
        if tag is None:
            return states
        ids = np.asarray(metadata.prompt_token_ids[row])
        return states[torch.from_numpy((ids == tag).nonzero()[0]).to(states.device)]

    # -- both ---------------------------------------------------------------------------------

    def _outputs(self, states: Tensor, params: PoolingParams) -> Tensor:
        """What is made of hidden states [r, h]: float32 [r, size]."""
        if self._compute_scores is None:
            return self._embeddings(states, params)
        scores = self._compute_scores(states).float()
        chosen = params.returned_token_ids or list(self.config.returned_token_ids)
        if chosen:
            scores = scores[:, chosen]
        return scores if params.use_activation is False else self._activation(scores)

    def _embeddings(self, states: Tensor, params: PoolingParams) -> Tensor:
        vectors = states.float()
        if params.dimensions is not None:
            vectors = vectors[:, : params.dimensions]
        normalize = self.config.normalize_embeddings
        if params.use_activation is not None:
            normalize = params.use_activation
        return F.normalize(vectors, dim=-1) if normalize else vectors


def _to_host(outputs: Tensor) -> Result:
    """A copy on the host that shares nothing with the step's tensors."""
    return np.array(outputs.cpu())
