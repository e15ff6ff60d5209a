"""What is a logits processor, and how does its state follow the rows of the batch?

The interface is vLLM's: `validate_params`, `is_argmax_invariant`, `update_state`, `apply`.
Processors of the house derive from `RowLogitsProcessor`, which keeps one state per batch row and
moves it as the batch says, so that none can forget to.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from jubako.sampling_params import SamplingParams

State = TypeVar("State")

LogitsRows = Mapping[int, int]
"""Batch row → row of the logits at hand; batch rows that are absent have no logits."""


class MoveDirectionality(Enum):
    """How two rows changed place."""

    UNIDIRECTIONAL = 0
    """The first row's content went to the second; the first is empty now."""
    SWAP = 1
    """The two rows exchanged their contents."""


class AddedRow(NamedTuple):
    """A request that entered the batch. `output_token_ids` is the live list, which grows."""

    row: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


Move = tuple[int, int, MoveDirectionality]


@dataclass
class BatchUpdate:
    """What happened to the batch's rows since the last step: apply removed, then added, then moved.

    An added or moved row may overwrite one that is still occupied; rows that were refilled do not
    appear in `removed`.
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[AddedRow] = ()
    moved: Sequence[Move] = ()


class LogitsProcessor(abc.ABC):
    """Changes logits before sampling. One object serves the whole batch."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool = False) -> None:
        """Take what is needed from the engine's `config`; `device` is where logits live."""
        self.device = device

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise `ValidationError` if a request's parameters do not suit this processor."""
        return

    @abc.abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether `apply` never changes which token is the most likely."""

    @abc.abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch; called every step, with None when no row changed."""

    @abc.abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Changed `logits` [n, V] float32, one row per batch row; in place is allowed."""

    def is_active(self) -> bool:
        """Whether `apply` may change anything now."""
        return True


class RowLogitsProcessor(LogitsProcessor, Generic[State]):
    """A processor whose state belongs to single rows, and which touches only rows that have one."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool = False) -> None:
        super().__init__(config, device, is_pin_memory)
        self.vocab_size: int = config.model_config.vocab_size
        self.rows: dict[int, State] = {}

    @abc.abstractmethod
    def state_for(self, added: AddedRow) -> State | None:
        """The state of a new row, or None if its parameters ask for nothing."""

    @abc.abstractmethod
    def apply_to(self, logits: Tensor, rows: LogitsRows) -> None:
        """Change `logits` [r, V] float32 in place in the given rows."""

    def active_rows(self) -> Sequence[int]:
        """Batch rows whose logits would be changed now."""
        return list(self.rows)

    def is_active(self) -> bool:
        return bool(self.rows)

    def apply(self, logits: Tensor) -> Tensor:
        self.apply_to(logits, {row: row for row in range(logits.shape[0])})
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for added in batch_update.added:
            self._put(added.row, self.state_for(added))
        for source, target, direction in batch_update.moved:
            moved = self.rows.pop(source, None)
            if direction is MoveDirectionality.SWAP:
                self._put(source, self.rows.pop(target, None))
            self._put(target, moved)

    def _put(self, row: int, state: State | None) -> None:
        if state is None:
            self.rows.pop(row, None)
        else:
            self.rows[row] = state

    def _valid_ids(self, token_ids: Any) -> np.ndarray[Any, Any]:
        """Unique ids, ascending, that exist in the vocabulary."""
        ids = np.unique(np.fromiter(token_ids, dtype=np.int64))
        return ids[(ids >= 0) & (ids < self.vocab_size)]


class TokenPatch(NamedTuple):
    """Entries of a logits matrix: `rows` and `token_ids`, both [m] int64, on the logits' device."""

    rows: Tensor
    token_ids: Tensor
    lengths: np.ndarray[Any, Any]
    """Entries of each patched row."""

    @classmethod
    def of(
        cls, rows: Sequence[int], ids: Sequence[np.ndarray[Any, Any]], device: torch.device
    ) -> TokenPatch:
        """`ids[i]` in row `rows[i]`."""
        lengths = np.fromiter((len(i) for i in ids), dtype=np.int64, count=len(ids))
        return cls(
            torch.from_numpy(np.repeat(np.asarray(rows, dtype=np.int64), lengths)).to(device),
            torch.from_numpy(np.concatenate(ids)).to(device),
            lengths,
        )

    def per_entry(self, values: Sequence[float]) -> Tensor:
        """One float32 value a row, repeated for the row's entries."""
        repeated = np.repeat(np.asarray(values, dtype=np.float32), self.lengths)
        return torch.from_numpy(repeated).to(self.rows.device)


@dataclass
class LogitsProcessors:
    """All processors of an engine, in the order in which they apply."""

    argmax_changing: list[LogitsProcessor] = field(default_factory=list)
    argmax_invariant: list[LogitsProcessor] = field(default_factory=list)

    EMPTY_ROWS: ClassVar[frozenset[int]] = frozenset()

    @property
    def all(self) -> list[LogitsProcessor]:
        """Both kinds."""
        return [*self.argmax_changing, *self.argmax_invariant]

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tell every processor what happened to the batch."""
        for processor in self.all:
            processor.update_state(batch_update)

    def rows_with_changes(self, num_rows: int) -> frozenset[int]:
        """Batch rows, of `num_rows`, whose most likely token a processor may change now."""
        rows: set[int] = set()
        for processor in self.argmax_changing:
            if isinstance(processor, RowLogitsProcessor):
                rows.update(processor.active_rows())
            elif processor.is_active():
                return frozenset(range(num_rows))
        return frozenset(rows) if rows else self.EMPTY_ROWS


def apply_processors(
    processors: Sequence[LogitsProcessor], logits: Tensor, batch_rows: Sequence[int], num_rows: int
) -> Tensor:
    """Apply processors to `logits` [r, V], whose row i is batch row `batch_rows[i]` of `num_rows`.

    A processor that knows only whole batches gets one, in which the rows without logits are zero.
    """
    places = {batch_row: i for i, batch_row in enumerate(batch_rows)}
    for processor in processors:
        if not processor.is_active():
            continue
        if isinstance(processor, RowLogitsProcessor):
            processor.apply_to(logits, places)
        elif list(batch_rows) == list(range(num_rows)):
            logits = processor.apply(logits)
        else:
            index = torch.as_tensor(batch_rows, device=logits.device)
            whole = logits.new_zeros(num_rows, logits.shape[1])
            whole[index] = logits
            logits = processor.apply(whole)[index]
    return logits
