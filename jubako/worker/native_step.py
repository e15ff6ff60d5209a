"""How does a step run as one call of native code?

A model whose layers can record themselves becomes a program; the others run layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jubako.kernels.registry import get_kernels
from jubako.utils.logging import get_logger
from jubako.worker.step_inputs import StepInputs

logger = get_logger(__name__)


class NativeStep:
    """Runs the steps of one model."""

    def __init__(self, program: Any) -> None:
        """`program` is a `kernels.cpu.program.NativeProgram`, recorded."""
        self._program = program

    @classmethod
    def of(
        cls, model: Any, dtype: torch.dtype, max_num_tokens: int, max_num_reqs: int
    ) -> NativeStep | None:
        """The model's, once its weights are packed; None if it cannot be a program."""
        if get_kernels().name != "cpu":
            return None
        from jubako.kernels.cpu.library import pool
        from jubako.kernels.cpu.program import NativeProgram
        from jubako.kernels.cpu.recording import RecordingError, record

        try:
            threads = pool(torch.get_num_threads())
            program = NativeProgram(dtype, max_num_tokens, max_num_reqs, threads)
            record(model, program)
        except RecordingError as error:
            logger.debug("The model runs layer by layer: no native form of %s.", error)
            return None
        program.finish()
        return cls(program)

    @property
    def candidates(self) -> Any:
        """A `kernels.cpu.head_candidates.CandidateHead`; None if choices need logits."""
        return self._program.candidates

    def bind(
        self,
        layers: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
        max_model_len: int,
    ) -> None:
        """Use the pages that these layers got; `groups` names the layers of each KV group."""
        sinks = max((getattr(layer, "sink_len", 0) for layer in layers.values()), default=0)
        self._program.bind(layers, groups, max_model_len + sinks)

    def dry_run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states [T, hidden] of a step that touches no KV."""
        hidden: torch.Tensor
        hidden, _ = self._program.run(input_ids.numpy(), positions.numpy(), None, None)
        return hidden

    def run(
        self, inputs: StepInputs, *, all_rows: bool, best_tokens: bool
    ) -> tuple[torch.Tensor, np.ndarray[Any, Any] | None]:
        """Final hidden states, of the sampled tokens or `all_rows`, and the sampled rows' choice.

        The states are overwritten by the next step. The choice, [r] int64, is each row's best
        token; None unless `best_tokens` is set and they can be had without logits.
        """
        out_index = None if all_rows else inputs.logits_indices.numpy()
        best_tokens = best_tokens and not all_rows and self._program.chooses_greedily
        hidden, chosen = self._program.run(
            inputs.input_ids.numpy(),
            inputs.positions.numpy(),
            inputs.attention,
            out_index,
            greedy=best_tokens,
        )
        return hidden, chosen
