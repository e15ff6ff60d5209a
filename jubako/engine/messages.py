"""What does a front end send to the engine core, and what does the core say at start-up?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler.engine_output import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
)
from jubako.scheduler.features import LoRARequest, MultiModalFeatureSpec

__all__ = [
    "EngineCoreEvent",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreReady",
    "EngineCoreRequest",
    "FinishReason",
    "UtilityOutput",
]


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that passed validation. Fields are only ever added at the end, with a default."""

    request_id: str
    """Internal id, unique in the engine."""
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    eos_token_id: int | None
    """The tokeniser's end of sequence; further ones are in `stop_token_ids`."""
    arrival_time: float
    """Wall clock, seconds."""
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    """Lower is sooner."""
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    """The caller's id."""
    reasoning_ended: bool | None = None

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """The parameters that are set."""
        params = self.sampling_params if self.pooling_params is None else self.pooling_params
        assert params is not None
        return params


class EngineCoreReady(msgspec.Struct, kw_only=True):
    """What the core decided at start-up; the front end validates requests against it."""

    version: str
    model: str
    """As given; the default model's name when none was."""
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    block_sizes: list[int]
    """Tokens a block, one entry a KV group."""
    num_gpu_blocks: int
    kv_cache_tokens: int
    """Tokens of context that fit, at the longest length."""
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str = "fcfs"
    supported_tasks: list[str] = msgspec.field(default_factory=lambda: ["generate"])
    startup_seconds: dict[str, float] = {}
    """Where start-up time went, by stage."""
