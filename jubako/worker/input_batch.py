"""Which requests run, in which rows, and with what parameters?

The batch persists from step to step, and rows change only where requests come and go. Every per-row
property is an entry of `InputBatch._fields`; there is no other way to add, move, swap or clear one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jubako.sampling.builtin_processors import PenaltiesLogitsProcessor
from jubako.sampling.logits_processors import AddedRow, LogitsProcessors
from jubako.sampling.metadata import NO_LOGPROBS, SamplingMetadata
from jubako.worker.batch_update import BatchUpdateBuilder
from jubako.worker.block_table import MultiGroupBlockTable
from jubako.worker.request_state import CachedRequestState
from jubako.worker.row_fields import ObjectField, RowField, ScalarField, TokenField

_MAX_TEMPERATURE = float(np.finfo(np.float32).max)


class InputBatch:
    """Rows 0 to n-1 hold the running requests; there are at most R = `max_num_reqs` of them.

    `remove_request` leaves a hole that `add_request` or `condense` fills. A step removes first,
    then adds, then condenses, perhaps swaps, and ends with `refresh_metadata`.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        block_table: MultiGroupBlockTable,
        logitsprocs: LogitsProcessors,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self.logitsprocs = logitsprocs
        self.block_table = block_table
        self._req_ids: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        self._update = BatchUpdateBuilder()

        rows = max_num_reqs
        self._tokens = TokenField(rows, max_model_len)
        self._num_tokens = ScalarField(rows, np.int32, lambda r: r.num_tokens)
        self._num_prompt_tokens = ScalarField(rows, np.int32, lambda r: r.num_prompt_tokens)
        self._num_computed = ScalarField(rows, np.int32, lambda r: r.num_computed_tokens)
        self._num_encoder_tokens = ScalarField(rows, np.int32, lambda r: r.num_encoder_tokens)
        self._temperature = ScalarField(rows, np.float32, _temperature)
        self._top_p = ScalarField(rows, np.float32, lambda r: r.sampling_params.top_p, 1.0)
        self._top_k = ScalarField(rows, np.int32, self._active_top_k, vocab_size)
        self._seeds = ScalarField(rows, np.uint64, lambda r: r.seed % 2**64)
        self._num_logprobs = ScalarField(rows, np.int32, self._logprobs_wanted, NO_LOGPROBS)
        self._outputs = ObjectField(rows, lambda r: r.output_token_ids)
        self._fields: list[RowField] = [
            self._tokens,
            self._num_tokens,
            self._num_prompt_tokens,
            self._num_computed,
            self._num_encoder_tokens,
            self._temperature,
            self._top_p,
            self._top_k,
            self._seeds,
            self._num_logprobs,
            self._outputs,
            self.block_table,
        ]
        self.sampling_metadata = self._make_sampling_metadata()

    # -- views --------------------------------------------------------------------------------

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_id_to_index)

    @property
    def req_ids(self) -> list[str]:
        """Ids by row; only between steps, when no row is empty."""
        assert None not in self._req_ids, "the batch has holes; condense it first"
        return self._req_ids  # type: ignore[return-value]

    @property
    def token_ids_cpu(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """[R, M]: prompt, outputs, drafts."""
        return self._tokens.ids

    @property
    def num_tokens_no_spec(self) -> np.ndarray[Any, Any]:
        """[R]: prompt and outputs known."""
        return self._num_tokens.values

    @property
    def num_prompt_tokens(self) -> np.ndarray[Any, Any]:
        """[R]."""
        return self._num_prompt_tokens.values

    @property
    def num_computed_tokens_cpu(self) -> np.ndarray[Any, Any]:
        """[R]: tokens whose KV exists before the step."""
        return self._num_computed.values

    @property
    def num_encoder_tokens(self) -> np.ndarray[Any, Any]:
        """[R]: tokens of the encoder's outputs."""
        return self._num_encoder_tokens.values

    @property
    def req_output_token_ids(self) -> list[list[int] | None]:
        """The requests' own output lists, by row."""
        return self._outputs.values[: len(self._req_ids)]

    # -- rows ---------------------------------------------------------------------------------

    def add_request(self, request: CachedRequestState) -> int:
        """Give a request the lowest freed row, else the next one. Returns the row."""
        assert request.req_id not in self.req_id_to_index, f"{request.req_id} is in the batch"
        if self._update.lowest_removed() is not None:
            row = self._update.pop_removed()
            self._req_ids[row] = request.req_id
        else:
            row = len(self._req_ids)
            assert row < self.max_num_reqs, f"more than {self.max_num_reqs} requests in a step"
            self._req_ids.append(request.req_id)
        self.req_id_to_index[request.req_id] = row
        self._update.add(
            AddedRow(
                row, request.sampling_params, request.prompt_token_ids, request.output_token_ids
            )
        )
        for field in self._fields:
            field.add(row, request)
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Free a request's row; returns it, or None if the request is not in the batch."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return None
        self._req_ids[row] = None
        self._update.remove(row)
        for field in self._fields:
            field.clear(row)
        return row

    def condense(self) -> None:
        """Fill holes with the last rows, so that rows 0 to n-1 are occupied."""
        last = len(self._req_ids) - 1
        while (hole := self._update.lowest_removed()) is not None:
            while last >= 0 and self._req_ids[last] is None:
                last -= 1
            if hole >= last:
                break
            self._update.pop_removed()
            self._update.move(last, hole)
            req_id = self._req_ids[last]
            assert req_id is not None
            self._req_ids[hole], self._req_ids[last] = req_id, None
            self.req_id_to_index[req_id] = hole
            for field in self._fields:
                field.move(last, hole)
        del self._req_ids[self.num_reqs :]

    def swap_states(self, first: int, second: int) -> None:
        """Exchange two occupied rows."""
        if first == second:
            return
        ids = self._req_ids
        ids[first], ids[second] = ids[second], ids[first]
        for row in (first, second):
            req_id = ids[row]
            assert req_id is not None, f"row {row} is empty"
            self.req_id_to_index[req_id] = row
        self._update.swap(first, second)
        for field in self._fields:
            field.swap(first, second)

    # -- tokens -------------------------------------------------------------------------------

    def append_tokens(self, rows: np.ndarray[Any, Any], token_ids: list[int]) -> None:
        """Add one output token to each of `rows`, to the requests' lists as well.

        ValueError if a request would exceed `max_model_len`.
        """
        lengths = self._tokens.lengths
        if len(rows) and int(lengths[rows].max()) >= self.token_ids_cpu.shape[1]:
            raise ValueError(
                "A request would have more than "
                f"max_model_len={self.token_ids_cpu.shape[1]} tokens."
            )
        self.token_ids_cpu[rows, lengths[rows]] = token_ids
        lengths[rows] += 1
        self._num_tokens.values[rows] += 1
        outputs = self._outputs.values
        for row, token_id in zip(rows.tolist(), token_ids, strict=True):
            output = outputs[row]
            assert output is not None
            output.append(token_id)

    def set_tokens(self, row: int, request: CachedRequestState) -> None:
        """Take prompt and outputs of a row anew, after its outputs were changed."""
        self._tokens.add(row, request)
        self._num_tokens.add(row, request)

    # -- sampling -----------------------------------------------------------------------------

    def refresh_metadata(self) -> None:
        """End a step's changes: tell the processors, rebuild `sampling_metadata` if needed."""
        assert len(self._req_ids) == self.num_reqs, "the batch has holes; condense it first"
        update = self._update.take(self.num_reqs)
        self.logitsprocs.update_state(update)
        if update is not None:
            self.sampling_metadata = self._make_sampling_metadata()

    def _make_sampling_metadata(self) -> SamplingMetadata:
        n = self.num_reqs
        temperature = self._temperature.values[:n].copy()
        top_k, top_p = self._top_k.values[:n].copy(), self._top_p.values[:n].copy()
        num_logprobs = self._num_logprobs.values[:n].copy()
        most = int(num_logprobs.max(initial=NO_LOGPROBS))
        outputs = [o for o in self._outputs.values[:n] if o is not None]
        return SamplingMetadata(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=self._seeds.values[:n].copy(),
            num_logprobs=num_logprobs,
            all_greedy=bool((temperature == 0).all()),
            all_random=bool((temperature > 0).all()),
            no_top_k=bool((top_k >= self.vocab_size).all()),
            no_top_p=bool((top_p >= 1).all()),
            no_penalties=not any(
                p.is_active()
                for p in self.logitsprocs.argmax_changing
                if isinstance(p, PenaltiesLogitsProcessor)
            ),
            max_num_logprobs=None if most == NO_LOGPROBS else most,
            output_token_ids=outputs,
            logitsprocs=self.logitsprocs,
        )

    def _active_top_k(self, request: CachedRequestState) -> int:
        top_k = request.sampling_params.top_k
        return top_k if 0 < top_k < self.vocab_size else self.vocab_size

    def _logprobs_wanted(self, request: CachedRequestState) -> int:
        wanted = request.sampling_params.logprobs
        if wanted is None:
            return NO_LOGPROBS
        return self.vocab_size if wanted == -1 else min(wanted, self.vocab_size)


def _temperature(request: CachedRequestState) -> float:
    params = request.sampling_params
    # Divided by infinity, forbidden logits would be no numbers, which win every comparison.
    return 0.0 if params.is_greedy else min(params.temperature, _MAX_TEMPERATURE)
