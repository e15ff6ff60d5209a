"""How does a step of an encoder-decoder model run the encoder, and whose are its outputs?

An output lives for one step: the decoder's layers write its keys and values in the step in which it
is made. Should a request start over, the encoder runs for it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from jubako.config.encoder import EncoderConfig
from jubako.worker.input_batch import InputBatch
from jubako.worker.request_state import CachedRequestState


@runtime_checkable
class HasEncoder(Protocol):
    """A model with an encoder."""

    def encode(self, inputs: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The inputs of some requests → the encoder's outputs [n, hidden] for each."""


@dataclass(frozen=True)
class EncoderOutputs:
    """What the encoder made in a step."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    """Batch rows of the requests, ascending."""
    outputs: list[Tensor]
    """[n, hidden] of each."""


class EncoderStep:
    """Runs the encoder of `model` for the requests that the scheduler names."""

    def __init__(self, model: HasEncoder, config: EncoderConfig, device: torch.device) -> None:
        self._model = model
        self._config = config
        self._device = device

    def run(
        self,
        batch: InputBatch,
        requests: Mapping[str, CachedRequestState],
        scheduled: Mapping[str, Sequence[int]],
    ) -> EncoderOutputs | None:
        """Encode the inputs of `scheduled`: request id → its items; None if there are none."""
        if not scheduled:
            return None
        rows = sorted(batch.req_id_to_index[req_id] for req_id in scheduled)
        inputs = []
        for row in rows:
            request = requests[batch.req_ids[row]]
            assert list(scheduled[request.req_id]) == [0], "a request has one encoder input"
            assert not batch.num_computed_tokens_cpu[row], "it is read before the first token"
            inputs.append(self._to_device(request.mm_features[0].data))
        outputs = self._model.encode(inputs)
        for row, output in zip(rows, outputs, strict=True):
            assert len(output) == batch.num_encoder_tokens[row], "slots were made for another size"
        return EncoderOutputs(np.array(rows, np.int64), outputs)

    def _to_device(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        # A copy: what came over a socket cannot be written to, which PyTorch warns of.
        return {name: torch.tensor(array).to(self._device) for name, array in data.items()}

    def dummy_outputs(self, budget: int) -> list[Tensor]:
        """The outputs for as many of the largest inputs as `budget` tokens have room for, at least
        one; to measure memory and warm up."""
        config = self._config
        data: dict[str, np.ndarray[Any, Any]]
        if config.modality == "audio":
            shape = (config.num_mel_bins, config.num_frames)
            data = {"input_features": np.zeros(shape, np.float32)}
        else:
            data = {"input_ids": np.zeros(config.max_input_tokens, np.int32)}
        count = max(1, budget // config.max_input_tokens)
        return self._model.encode([self._to_device(data)] * count)
