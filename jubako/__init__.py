"""Jubako: an LLM inference and serving engine built around its KV cache.

Names are loaded when they are first used, so that importing the package costs nothing that the
program does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "Transcription",
    "__version__",
]

if TYPE_CHECKING:
    from jubako.entrypoints.llm import LLM
    from jubako.frontend.async_llm import AsyncLLM
    from jubako.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput, Transcription
    from jubako.sampling_params import PoolingParams, SamplingParams

_HOMES = {
    "LLM": "jubako.entrypoints.llm",
    "AsyncLLM": "jubako.frontend.async_llm",
    "CompletionOutput": "jubako.outputs",
    "PoolingParams": "jubako.sampling_params",
    "PoolingRequestOutput": "jubako.outputs",
    "RequestOutput": "jubako.outputs",
    "SamplingParams": "jubako.sampling_params",
    "Transcription": "jubako.outputs",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jubako' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
