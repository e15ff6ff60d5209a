"""What comes back from the workers after a step?"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
IntArray = np.ndarray[Any, np.dtype[np.int32]]


class LogprobsLists(msgspec.Struct):
    """Logprobs of sampled tokens, one row a position; column 0 is the sampled token.

    `logprob_token_ids` [rows, k+1] int32, `logprobs` [rows, k+1] float32, `sampled_token_ranks`
    [rows] int32, from 1. `cu_num_generated_tokens` [requests+1] tells where each request's rows
    start, when requests emit several tokens or some have no logprobs; without it there is one row a
    request. `row_widths` [rows] tells how many columns of each row count, where they differ.
    """

    logprob_token_ids: IntArray
    logprobs: FloatArray
    sampled_token_ranks: IntArray
    cu_num_generated_tokens: list[int] | None = None
    row_widths: list[int] | None = None

    def slice_request(self, row: int, count: int) -> LogprobsLists:
        """The first `count` positions of the request in batch row `row`."""
        start = row if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[row]
        rows = slice(start, start + count)
        columns = slice(None)
        if self.row_widths is not None:
            # Rows of one request have one width.
            columns = slice(max(self.row_widths[rows], default=None))
        return LogprobsLists(
            self.logprob_token_ids[rows, columns],
            self.logprobs[rows, columns],
            self.sampled_token_ranks[rows],
        )


class KVConnectorOutput(msgspec.Struct, kw_only=True):
    """What the workers' KV connectors report after a step."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    invalid_block_ids: set[int] = set()
    expected_finished_count: int = 0
    failed_recving: set[str] | None = None
    """Loads that have ended without bringing all; not among `finished_recving`."""
    failed_sending: set[str] | None = None


class ECConnectorOutput(msgspec.Struct, kw_only=True):
    """What the workers' encoder-cache connectors report after a step."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """Tokens of one step. `req_ids` is the row order, not necessarily the scheduler's."""

    req_ids: list[str] = []
    req_id_to_index: dict[str, int] = {}
    sampled_token_ids: list[list[int]] = []
    """Per row: [] for an unfinished prefill chunk, 1 token, or accepted drafts + 1."""
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsLists | None] = {}
    """Set on the step that ends the prompt: rows for prompt positions 1 to P-1, where column 0 is
    the prompt token itself."""
    pooler_output: list[Any] | None = None
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: ECConnectorOutput | None = None
    num_nans_in_logits: dict[str, int] | None = None
    failures: dict[str, str] | None = None
    """Requests that no token could be chosen for, and why; their rows have none."""


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
"""The answer to a step without tokens. Never changed."""


class DraftTokenIds(msgspec.Struct):
    """Draft tokens that a proposer made for the next step."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]
