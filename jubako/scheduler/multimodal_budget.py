"""How many embeddings may a step encode and the cache hold, and how many items is that at most?

One item always fits an empty cache and an empty step: an item is never encoded in part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jubako.config import SchedulerConfig
from jubako.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MediaSize:
    """The largest item of a modality."""

    embeds: int
    """Rows of encoder output."""
    positions: int
    """Places in the prompt, those included that take no embedding."""


class MultiModalBudget:
    """Budgets in embeddings, for media of these modalities.

    `largest` has the largest item of each modality that the model reads, `limits` how many of them
    a prompt may have (none: 1); a modality with the limit 0 is off. Without media both budgets are
    0; an unset option counts as `max_num_batched_tokens`. `num_spec_tokens` are the drafts of a
    request in a step.

    Raises `ConfigError` if an item that may not be split could be kept waiting for ever.
    """

    def __init__(
        self,
        options: SchedulerConfig,
        max_model_len: int,
        largest: Mapping[str, MediaSize],
        limits: Mapping[str, int] | None = None,
        *,
        num_spec_tokens: int = 0,
    ) -> None:
        self._options = options
        self._max_model_len = max_model_len
        self._limits = {name: (limits or {}).get(name, 1) for name in largest}
        for name, size in largest.items():
            if not 0 < size.embeds <= size.positions:
                raise ConfigError(
                    f"{name} items have {size.embeds} embeddings at {size.positions} positions; "
                    "there must be one at least, and a position for each."
                )
        self.largest = {name: size for name, size in largest.items() if self._limits[name] > 0}
        """The largest items of the modalities that are on."""
        self.max_tokens_per_mm_item = max((s.embeds for s in self.largest.values()), default=0)
        self.encoder_compute_budget = self.encoder_cache_size = 0
        if self.largest:
            at_least = self.max_tokens_per_mm_item
            compute = options.max_num_encoder_input_tokens or options.token_budget
            self.encoder_compute_budget = max(compute, at_least)
            self.encoder_cache_size = max(
                options.encoder_cache_size or options.token_budget, at_least
            )
            if options.disable_chunked_mm_input:
                self._check_whole_items(num_spec_tokens)

    def _check_whole_items(self, num_spec_tokens: int) -> None:
        budget, seqs = self._options.token_budget, self._options.seq_limit
        room = budget - seqs * (1 + num_spec_tokens)
        for name, size in self.largest.items():
            if size.positions > room:
                decodes = f"{seqs} requests that decode"
                if num_spec_tokens:
                    decodes += f" with {num_spec_tokens} drafts each"
                raise ConfigError(
                    f"max_num_batched_tokens={budget} leaves {max(room, 0)} tokens beside "
                    f"{decodes}, but the largest {name} takes {size.positions}, which this model "
                    "computes in one step; raise it, or lower max_num_seqs.",
                    "max_num_batched_tokens",
                )

    def get_max_items_per_prompt(self, modality: str) -> int:
        """Most items of a modality in one prompt; it counts as one that fits even if none does."""
        fitting = self._max_model_len // self.largest[modality].embeds
        return max(min(self._limits[modality], fitting), 1)

    def get_max_items_per_batch(self, modality: str) -> int:
        """Most items of a modality that one step encodes: what profiling has to try."""
        per_item = self.largest[modality].embeds
        budget = min(self.encoder_compute_budget, self.encoder_cache_size)
        requests = self._options.seq_limit
        if not self._options.enable_chunked_prefill:
            requests = min(requests, self._options.token_budget // per_item)
        wanted = requests * self.get_max_items_per_prompt(modality)
        return max(min(budget // per_item, wanted), 1)
