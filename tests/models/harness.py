"""How do the tests run a model without scheduler and runner?

`PagedRunner` keeps the KV pages and block tables of a few requests, whose blocks it hands out in
scrambled order, and runs any mixture of chunks as one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from jubako.config import JubakoConfig
from jubako.kernels.metadata import AttentionMetadata
from jubako.layers.forward_context import set_forward_context
from jubako.models.load import build_model, cache_layers
from tests.kernels.paging import make_metadata


def make_config(
    hf_config: dict[str, Any], dtype: str = "float32", max_model_len: int = 256
) -> JubakoConfig:
    """A configuration as it is when the checkpoint has been read."""
    return JubakoConfig().replace(
        model_config={
            "hf_config": hf_config,
            "architecture": hf_config["architectures"][0],
            "dtype": dtype,
            "max_model_len": max_model_len,
        }
    )


def hf_config_of(reference: Any) -> dict[str, Any]:
    """What config.json of a transformers model would hold."""
    hf_config: dict[str, Any] = reference.config.to_dict()
    hf_config["architectures"] = [type(reference).__name__]
    return hf_config


def from_transformers(reference: Any, dtype: str = "float32", max_model_len: int = 256) -> Any:
    """Our model with the weights and the configuration of a transformers model."""
    config = make_config(hf_config_of(reference), dtype, max_model_len)
    model: Any = build_model(config, torch.device("cpu"))
    # A model takes over what it loads, and packing consumes it.
    model.load_weights((name, tensor.clone()) for name, tensor in reference.state_dict().items())
    return model


class PagedRunner:
    """Requests are numbered from 0; all layers share one set of block tables.

    Pages hold NaN wherever no token has been written.
    """

    def __init__(
        self,
        model: Any,
        num_requests: int = 8,
        block_size: int = 4,
        num_blocks: int = 256,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.layers = cache_layers(model)
        self.block_size = block_size
        for layer in self.layers.values():
            page = layer.get_kv_cache_spec(block_size).page_size_bytes
            # Bytes of ones only are NaN in every floating-point type.
            layer.bind_kv_cache(torch.full((num_blocks, page), -1, dtype=torch.int8), block_size)
        self.free: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.tables: list[list[int]] = [[] for _ in range(num_requests)]
        self.lengths = [0] * num_requests

    @torch.inference_mode()
    def step(self, chunks: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Run the tokens of each request; returns the logits of each of them [m, V]."""
        query_lens = [len(tokens) for tokens in chunks.values()]
        positions = [
            torch.arange(self.lengths[r], self.lengths[r] + len(tokens))
            for r, tokens in chunks.items()
        ]
        for r, tokens in chunks.items():
            self.lengths[r] += len(tokens)
            while len(self.tables[r]) * self.block_size < self.lengths[r]:
                self.tables[r].append(self.free.pop())
        metadata = make_metadata(
            query_lens,
            [self.lengths[r] for r in chunks],
            [self.tables[r] for r in chunks],
            self.block_size,
        )
        ids = torch.tensor([t for tokens in chunks.values() for t in tokens], dtype=torch.int32)
        hidden = self._forward(ids, torch.cat(positions), metadata)
        logits = self.model.compute_logits(hidden)
        return dict(zip(chunks, logits.split(query_lens)))

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        with set_forward_context(dict.fromkeys(self.layers, metadata)):
            hidden: torch.Tensor = self.model(ids, positions)
        return hidden

    def generate(self, prompts: dict[int, list[int]], count: int) -> dict[int, list[int]]:
        """Greedy tokens of requests that run together."""
        out: dict[int, list[int]] = {r: [] for r in prompts}
        chunks = prompts
        for _ in range(count):
            for r, logits in self.step(chunks).items():
                out[r].append(int(logits[-1].argmax()))
            chunks = {r: tokens[-1:] for r, tokens in out.items()}
        return out
