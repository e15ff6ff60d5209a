"""Who computes how many tokens in the next step?

The scheduler needs no model and no torch, so a router or a simulator can use it as it is:

>>> from jubako.config import JubakoConfig, ModelConfig, SchedulerConfig
>>> from jubako.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
>>> from jubako.sampling_params import SamplingParams
>>> from jubako.scheduler import ModelRunnerOutput, Request, Scheduler
>>> layers = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
>>> scheduler = Scheduler(
...     JubakoConfig(
...         model_config=ModelConfig(max_model_len=32),
...         scheduler_config=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4),
...     ),
...     KVCacheConfig(num_blocks=20, kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)]),
... )
>>> scheduler.add_request(Request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=2)))
>>> step = scheduler.schedule()
>>> step.num_scheduled_tokens, step.scheduled_new_reqs[0].block_ids
({'a': 5}, ([1, 2],))
>>> result = ModelRunnerOutput(
...     req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[7]]
... )
>>> scheduler.update_from_output(step, result)[0].outputs[0].new_token_ids
[7]
>>> step = scheduler.schedule()
>>> step.num_scheduled_tokens
{'a': 1}
>>> last = scheduler.update_from_output(step, result)[0].outputs[0]
>>> str(last.finish_reason), scheduler.schedule().finished_req_ids
('length', {'a'})
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jubako.utils.lazy import exports_on_use

if TYPE_CHECKING:
    from jubako.scheduler.async_scheduler import AsyncScheduler, OverlappingScheduler
    from jubako.scheduler.encoder_cache import EncoderCacheManager
    from jubako.scheduler.encoder_decoder_cache import EncoderDecoderCacheManager
    from jubako.scheduler.engine_output import (
        EncoderCacheStats,
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        FinishReason,
        SchedulerStats,
        SpecDecodingStats,
        UtilityOutput,
    )
    from jubako.scheduler.features import LoRARequest, MultiModalFeatureSpec, PlaceholderRange
    from jubako.scheduler.model_output import (
        EMPTY_MODEL_RUNNER_OUTPUT,
        DraftTokenIds,
        ECConnectorOutput,
        KVConnectorOutput,
        LogprobsLists,
        ModelRunnerOutput,
    )
    from jubako.scheduler.multimodal_budget import MediaSize, MultiModalBudget
    from jubako.scheduler.output import (
        CachedRequestData,
        GrammarOutput,
        NewRequestData,
        SchedulerOutput,
    )
    from jubako.scheduler.protocols import (
        ECConnector,
        GroupMatch,
        KVConnector,
        StructuredOutputManager,
    )
    from jubako.scheduler.queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue
    from jubako.scheduler.request import Request, RequestStatus
    from jubako.scheduler.scheduler import Scheduler

__all__ = [
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "AsyncScheduler",
    "CachedRequestData",
    "DraftTokenIds",
    "ECConnector",
    "ECConnectorOutput",
    "EncoderCacheManager",
    "EncoderCacheStats",
    "EncoderDecoderCacheManager",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "FCFSRequestQueue",
    "FinishReason",
    "GrammarOutput",
    "GroupMatch",
    "KVConnector",
    "KVConnectorOutput",
    "LoRARequest",
    "LogprobsLists",
    "MediaSize",
    "ModelRunnerOutput",
    "MultiModalBudget",
    "MultiModalFeatureSpec",
    "NewRequestData",
    "OverlappingScheduler",
    "PlaceholderRange",
    "PriorityRequestQueue",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "SchedulerStats",
    "SpecDecodingStats",
    "StructuredOutputManager",
    "UtilityOutput",
]

# The records of a package are read where its classes are not wanted: in the front end.
__getattr__ = exports_on_use(
    __name__,
    __all__,
    (
        "async_scheduler",
        "encoder_cache",
        "encoder_decoder_cache",
        "engine_output",
        "features",
        "model_output",
        "multimodal_budget",
        "output",
        "protocols",
        "queue",
        "request",
        "scheduler",
    ),
)
