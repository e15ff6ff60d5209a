"""What has a row of the matrix whose model reads an input of its own before it writes?

The prompts of the matrix are the decoder's. The encoder's input is another for every prompt, and
follows from it, so that nobody needs to carry it along.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tests.exactness.oracle import Oracle
from tests.exactness.sizes import VOCAB

ENCODER_LENGTHS = (1, 16, 75, 150, 260, 400, 700)
"""Of texts, in tokens."""


def hears(config: Any) -> bool:
    """Whether the encoder reads spectrograms; else texts."""
    return hasattr(config, "num_mel_bins")


def begun(ids: Sequence[int], config: Any) -> list[int]:
    """`ids` with the token at the front that a decoder begins with."""
    return [config.decoder_start_token_id, *ids[1:]]


def encoder_input(ids: Sequence[int], config: Any) -> np.ndarray:
    """What the encoder reads beside the decoder prompt `ids`: a spectrogram, or token ids."""
    if hears(config):
        rng = np.random.default_rng(list(ids))
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
        return rng.standard_normal(shape, np.float32)
    draw = random.Random(repr(list(ids)))
    length = draw.choice(ENCODER_LENGTHS)
    return np.array([draw.randrange(3, VOCAB) for _ in range(length)])


def as_input(ids: list[int], config: Any) -> dict[str, Any]:
    """The prompt for `LLM.generate`."""
    given = encoder_input(ids, config)
    encoder = {"input_features": given} if hears(config) else {"prompt_token_ids": given.tolist()}
    return {"encoder_prompt": encoder, "decoder_prompt": ids}


class EncoderDecoderOracle(Oracle):
    """As `Oracle`, for decoder prompts whose encoder input follows from them."""

    @torch.inference_mode()
    def _logits(self, prompt: list[int], answer: list[int]) -> Iterator[torch.Tensor]:
        yield from self._all_logits(prompt, prompt + answer[:-1])[-len(answer) :].float()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int]) -> torch.Tensor:
        """Log-probabilities [P, V] after each token of the decoder prompt, float32."""
        return self._all_logits(prompt, prompt).float().log_softmax(-1)

    def _all_logits(self, prompt: list[int], ids: list[int]) -> torch.Tensor:
        """Logits [P, V] after each of `ids`, which begin with `prompt`."""
        config = self.model.config
        given = torch.from_numpy(encoder_input(prompt, config))[None]
        name = "input_features" if hears(config) else "input_ids"
        if hears(config):
            given = given.to(self.model.dtype)
        out = self.model(**{name: given}, decoder_input_ids=torch.tensor([ids]), use_cache=False)
        logits: torch.Tensor = out.logits[0]
        return logits
