"""On how many workers, and of which kind, does an engine run?"""

from __future__ import annotations

from dataclasses import dataclass

from jubako.config.options import check_types
from jubako.errors import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """Workers and how the model is spread over them. One worker is what is built so far."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "data_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", name)

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
        )
