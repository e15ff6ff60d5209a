"""What does the scheduler tell the workers to do in a step?

Requests travel in full once (`NewRequestData`) and as differences afterwards (`CachedRequestData`),
so every worker keeps a mirror of each request that is alive.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler.features import LoRARequest, MultiModalFeatureSpec

BlockIds = tuple[list[int], ...]
"""Block ids, one list a KV group."""


class NewRequestData(msgspec.Struct, kw_only=True):
    """A request that a worker hears of for the first time."""

    req_id: str
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    block_ids: BlockIds
    """All blocks, prefix hits included."""
    num_computed_tokens: int
    """Tokens whose KV exists before this step."""
    mm_features: list[MultiModalFeatureSpec] = []
    pooling_params: PoolingParams | None = None
    lora_request: LoRARequest | None = None
    prompt_embeds: Any = None
    prefill_token_ids: list[int] | None = None
    seed: int | None = None
    """The request's own seed, or one drawn when it was added; None for pooling."""


class CachedRequestData(msgspec.Struct, kw_only=True):
    """What changed for requests that the workers already know: parallel lists."""

    req_ids: list[str] = []
    resumed_req_ids: set[str] = set()
    """For these, `new_block_ids` replaces the block list; for all others it is appended."""
    new_token_ids: list[list[int]] = []
    """Only with pipeline parallelism: tokens that the first stage cannot know."""
    all_token_ids: dict[str, list[int]] = {}
    """Full token list of each listed request that sat out the previous step."""
    new_block_ids: list[BlockIds | None] = []
    """None where no group got a block."""
    num_computed_tokens: list[int] = []
    """Before this step."""
    num_output_tokens: list[int] = []
    """Outputs known, plus placeholders in flight."""

    @property
    def num_reqs(self) -> int:
        """Requests listed."""
        return len(self.req_ids)


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step's work. The order of `num_scheduled_tokens` is the order of the batch."""

    scheduled_new_reqs: list[NewRequestData] = []
    scheduled_cached_reqs: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = {}
    """Every scheduled request; at least 1, drafts included."""
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}
    scheduled_encoder_inputs: dict[str, list[int]] = {}
    num_common_prefix_blocks: list[int] = []
    """Per KV group, blocks shared by all holders of KV."""
    finished_req_ids: set[str] = set()
    """Finished since the last step: workers drop their state."""
    free_encoder_mm_hashes: list[str] = []
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    num_invalid_spec_tokens: dict[str, int] | None = None
    kv_connector_metadata: Any = None
    ec_connector_metadata: Any = None
    is_over: bool = False
    """Whether its result has been taken, which happens once."""


class GrammarOutput(msgspec.Struct, kw_only=True):
    """Token masks for the requests that a grammar constrains."""

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray[Any, np.dtype[np.int32]]
    """Rows in the order of the ids, `1 + drafts` each; a set bit allows the token."""
