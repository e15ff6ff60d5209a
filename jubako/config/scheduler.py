"""How much work goes into a step, and whose?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types, option
from jubako.errors import ConfigError

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_NUM_SEQS = 128


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler.

    `max_num_batched_tokens` and `max_num_seqs` may be None until the defaults for the kind of use
    and device are filled in (`engine.setup`).
    """

    max_num_batched_tokens: int | None = option(
        None, "Most tokens computed in one step, over all requests."
    )
    max_num_seqs: int | None = option(None, "Most requests that run at once.")
    max_num_active_seqs: int | None = option(
        None, "Most requests that hold KV at once, running or while it is loaded; none: no limit."
    )
    long_prefill_token_threshold: int = option(
        0, "Most tokens one request may compute in a step, drafts included; 0: no limit."
    )
    enable_chunked_prefill: bool = option(True, "Prompts may be computed over several steps.")
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "Who goes first: the earliest, or the lowest priority number."
    )
    async_scheduling: bool | None = option(
        None, "Plan a step before the tokens of the last one are known (default: off on a CPU)."
    )
    fair_prefill: bool = option(True, "Cap a long prompt at its fair share while others wait.")
    admission_lookahead: int = option(
        8, "How many requests may overtake one that does not fit yet; 0: none."
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False, "Keep all tokens of all layers, also of layers that look back only a window."
    )
    scheduler_reserve_full_isl: bool = option(
        True, "Admit a request only if its whole prompt fits into the KV cache."
    )
    stream_interval: int = option(1, "Tokens between two outputs of a streaming request.")
    max_num_encoder_input_tokens: int = 0
    """Most embeddings that the encoder makes in a step; 0: like `max_num_batched_tokens`."""
    encoder_cache_size: int = 0
    """Embeddings of encoder outputs that are kept; 0: like `max_num_batched_tokens`."""
    disable_chunked_mm_input: bool = False
    """Media items are never split over two steps."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_num_active_seqs",
            "stream_interval",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.", name)
        for name in (
            "long_prefill_token_threshold",
            "admission_lookahead",
            "max_num_encoder_input_tokens",
            "encoder_cache_size",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0.", name)
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_seqs is not None
            and self.max_num_seqs > self.max_num_batched_tokens
        ):
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} is more than "
                f"max_num_batched_tokens={self.max_num_batched_tokens}; every running request "
                "needs at least one token a step.",
                "max_num_seqs",
            )

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or the bare default."""
        return self.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS

    @property
    def seq_limit(self) -> int:
        """`max_num_seqs`, or the bare default, never more than the token budget."""
        return self.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, self.token_budget)
