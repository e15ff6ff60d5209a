"""What does a worker remember of a request that is alive, whether it runs now or not?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler.features import LoRARequest, MultiModalFeatureSpec

if TYPE_CHECKING:
    from jubako.sampling.pooling_metadata import PoolingStates
    from jubako.worker.prompt_logprobs import PromptLogprobs


@dataclass
class CachedRequestState:
    """A worker's mirror of a request. It survives preemption and steps that the request sits out.

    `block_ids` has one list a KV group. `output_token_ids` is shared by reference with the batch
    and the logits processors: change it in place, never replace it.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """64 bits; with the output index and the token id it fixes the request's random numbers."""
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    """Tokens whose KV existed when the request last entered the batch."""
    output_token_ids: list[int] = field(default_factory=list)
    mm_features: list[MultiModalFeatureSpec] = field(default_factory=list)
    pooling_params: PoolingParams | None = None
    pooling_states: PoolingStates | None = None
    """Set with `pooling_params`."""
    lora_request: LoRARequest | None = None
    prompt_embeds: Any = None
    prompt_logprobs: PromptLogprobs | None = None
    """What is known so far; None if not wanted, or delivered."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens of the encoder's output; 0 without an encoder."""
        return sum(feature.mm_position.length for feature in self.mm_features)

    @property
    def num_tokens(self) -> int:
        """Prompt and known outputs."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def get_token_id(self, index: int) -> int:
        """The token at a position of prompt and outputs; -1 past the end."""
        if index < self.num_prompt_tokens:
            return self.prompt_token_ids[index]
        index -= self.num_prompt_tokens
        return self.output_token_ids[index] if index < len(self.output_token_ids) else -1
