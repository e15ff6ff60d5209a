"""How is one field of the persistent batch filled, moved, swapped and cleared?

`InputBatch` names its fields once, in a list, and every operation on rows goes through that list,
so no field can be forgotten in one of them. A row is cleared when it is freed and when it is moved
away from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from jubako.worker.request_state import CachedRequestState

T = TypeVar("T")


class RowField(Protocol):
    """One property of every row of the batch."""

    def add(self, row: int, request: CachedRequestState) -> None:
        """Take the row's value from a request that enters it."""

    def clear(self, row: int) -> None:
        """Make the row neutral."""

    def move(self, source: int, target: int) -> None:
        """Bring a value to another row; the source is left neutral."""

    def swap(self, first: int, second: int) -> None:
        """Exchange two rows' values."""


class ScalarField:
    """A number a row: `values` [R]."""

    def __init__(
        self,
        num_rows: int,
        dtype: type,
        value_of: Callable[[CachedRequestState], Any],
        neutral: Any = 0,
    ) -> None:
        self.values: np.ndarray[Any, Any] = np.full(num_rows, neutral, dtype=dtype)
        self._value_of = value_of
        self._neutral = neutral

    def add(self, row: int, request: CachedRequestState) -> None:
        self.values[row] = self._value_of(request)

    def clear(self, row: int) -> None:
        self.values[row] = self._neutral

    def move(self, source: int, target: int) -> None:
        self.values[target] = self.values[source]
        self.clear(source)

    def swap(self, first: int, second: int) -> None:
        self.values[[first, second]] = self.values[[second, first]]


class ObjectField(Generic[T]):
    """An object a row; `values` is as long as the batch has had rows, None where a row is empty."""

    def __init__(self, num_rows: int, value_of: Callable[[CachedRequestState], T]) -> None:
        self.values: list[T | None] = [None] * num_rows
        self._value_of = value_of

    def add(self, row: int, request: CachedRequestState) -> None:
        self.values[row] = self._value_of(request)

    def clear(self, row: int) -> None:
        self.values[row] = None

    def move(self, source: int, target: int) -> None:
        self.values[target] = self.values[source]
        self.clear(source)

    def swap(self, first: int, second: int) -> None:
        self.values[first], self.values[second] = self.values[second], self.values[first]


class TokenField:
    """Token ids: `ids` [R, M] int32, of which the first `lengths[row]` count.

    The array is a mapping of zero pages, so rows that were never used cost no memory; what lies
    beyond a length is never read, and so is never wiped.
    """

    def __init__(self, num_rows: int, max_length: int) -> None:
        self.ids: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(
            (num_rows, max_length), dtype=np.int32
        )
        self.lengths: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(num_rows, dtype=np.int32)

    def row(self, row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The ids of a row."""
        return self.ids[row, : self.lengths[row]]

    def extend(self, row: int, token_ids: list[int]) -> None:
        """Append ids. ValueError if the row would exceed M."""
        start = int(self.lengths[row])
        end = start + len(token_ids)
        if end > self.ids.shape[1]:
            raise ValueError(
                f"A request would have {end} tokens; max_model_len is {self.ids.shape[1]}."
            )
        self.ids[row, start:end] = token_ids
        self.lengths[row] = end

    def add(self, row: int, request: CachedRequestState) -> None:
        self.lengths[row] = 0
        self.extend(row, request.prompt_token_ids)
        self.extend(row, request.output_token_ids)

    def clear(self, row: int) -> None:
        self.lengths[row] = 0

    def move(self, source: int, target: int) -> None:
        length = self.lengths[source]
        self.ids[target, :length] = self.ids[source, :length]
        self.lengths[target] = length
        self.clear(source)

    def swap(self, first: int, second: int) -> None:
        longest = int(self.lengths[[first, second]].max())
        self.ids[[first, second], :longest] = self.ids[[second, first], :longest]
        self.lengths[[first, second]] = self.lengths[[second, first]]
