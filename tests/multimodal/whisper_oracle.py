"""What transformers makes of features: greedy, with its own processors of Whisper's rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from jubako.checkpoint.info import open_checkpoint
from jubako.models.loader import load_weights


class Oracle:
    """transformers' Whisper in float32, with the weights of a folder as they are read here."""

    def __init__(self, folder: Path | str) -> None:
        checkpoint = open_checkpoint(str(folder))
        self.generation = checkpoint.generation_config
        config = {k: v for k, v in checkpoint.hf_config.items() if k != "dtype"}
        weights = dict(load_weights(checkpoint, torch.float32))
        weights.setdefault("proj_out.weight", weights["model.decoder.embed_tokens.weight"])
        with torch.device("meta"):
            self.model = WhisperForConditionalGeneration(WhisperConfig(**config))
        self.model.load_state_dict(weights, strict=True, assign=True)
        self.model.eval()
        self.end = int(config["eos_token_id"])
        self.longest = int(config["max_target_positions"])

    @torch.inference_mode()
    def answer(
        self, features: np.ndarray, prompt: Sequence[int], no_timestamps: int, timestamps: bool
    ) -> list[int]:
        """Tokens written after `prompt`, up to the end of the text or of the context."""
        encoded = self.model.model.encoder(torch.from_numpy(features)[None])
        # The time at the end of the prompt counts as the first token written.
        begin = len(prompt) - timestamps
        processors: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(
                self.generation.get("begin_suppress_tokens", []), begin
            ),
            SuppressTokensLogitsProcessor(self.generation.get("suppress_tokens", [])),
        ]
        if timestamps:
            rules = GenerationConfig(
                no_timestamps_token_id=no_timestamps, eos_token_id=self.end, bos_token_id=self.end
            )
            rules.max_initial_timestamp_index = None
            processors.append(WhisperTimeStampLogitsProcessor(rules, begin_index=begin))
        ids, new = list(prompt), list(prompt)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        while len(ids) < self.longest and ids[-1] != self.end:
            out = self.model(
                decoder_input_ids=torch.tensor([new]), encoder_outputs=encoded, cache=cache
            )
            logits = out.logits[:, -1]
            for processor in processors:
                logits = processor(torch.tensor([ids]), logits)
            new = [int(logits.argmax())]
            ids += new
        return ids[len(prompt) :]
