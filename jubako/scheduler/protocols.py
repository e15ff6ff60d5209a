"""What does the scheduler need from rooms above it?

Grammars and connectors import more than the scheduler may, so they are handed in as objects that
satisfy these protocols. Each is optional; None means that the feature is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jubako.kv_cache import KVCacheBlocks
from jubako.scheduler.model_output import ECConnectorOutput, KVConnectorOutput
from jubako.scheduler.output import SchedulerOutput
from jubako.scheduler.request import Request


class StructuredOutputManager(Protocol):
    """Grammars that constrain what requests may generate."""

    def is_ready(self, request: Request) -> bool:
        """Whether the request's grammar is compiled; raises if it cannot be."""
        ...

    def grammar_bitmask(
        self, requests: Sequence[Request], drafts: Mapping[str, list[int]]
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Allowed tokens, `1 + drafts` rows a request, in order."""
        ...

    def accept_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        """Advance the request's grammar over tokens that were kept."""
        ...

    def validate_drafts(self, request: Request, token_ids: list[int]) -> list[int]:
        """The drafts before the first that the grammar refuses."""
        ...

    def release(self, request: Request) -> None:
        """The request has ended."""
        ...


class KVConnector(Protocol):
    """The scheduler's half of a connector that brings KV from elsewhere and takes it there."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the local ones that can be loaded (None: not known yet), and whether the
        load takes place outside a step."""
        ...

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has the blocks that the load will fill."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """This step's instructions for the workers' halves."""
        ...

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers' halves report."""
        ...

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must outlive the request, and parameters for its last output."""
        ...

    def reset_cache(self) -> bool:
        """Forget what is stored elsewhere; False if that is not possible now."""
        ...

    def shutdown(self) -> None:
        """The engine ends."""
        ...


class ECConnector(Protocol):
    """The scheduler's half of a connector that shares encoder outputs."""

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the output can be loaded; fast, and without side effects."""
        ...

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """There is room for media item `index` of the request; load it."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """This step's instructions for the workers' halves."""
        ...

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """What the workers' halves report."""
        ...

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether its encoder outputs must be kept until they are sent."""
        ...

    def shutdown(self) -> None:
        """The engine ends."""
        ...
