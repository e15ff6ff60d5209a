"""A model without weights whose output betrays every wrong address.

Each layer stores a fingerprint of (token, position, layer) in its KV pages and sums up those that a
query may see, read back through the block table. Hidden states hash these sums; logits are a hash
of the hidden state and the vocabulary id. A wrong slot, a stale block, a wrong position or a
missing token changes the logits, and `dense_logits` says what they must be without any cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from jubako.config import JubakoConfig
from jubako.kernels.metadata import AttentionMetadata
from jubako.kv_cache.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from jubako.kv_cache.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from jubako.layers.forward_context import get_forward_context
from jubako.worker.model_runner import ModelRunner
from jubako.worker.staging import StepStaging

VOCAB_SIZE = 53


def mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit avalanche hash."""
    x = x.astype(np.uint64)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x7FB5D329728EA185)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x81DADEF4BC2DD44D)
    return x ^ (x >> np.uint64(33))


def fingerprints(token_ids: np.ndarray, positions: np.ndarray, salt: int) -> np.ndarray:
    ids, places = token_ids.astype(np.uint64), positions.astype(np.uint64)
    return mix(ids * np.uint64(1_000_003) + places * np.uint64(7_919) + np.uint64(salt * 65_537))


class StubLayer:
    """Keeps 8 bytes a token."""

    def __init__(self, layer_name: str, salt: int, window: int | None = None) -> None:
        self.layer_name = layer_name
        self.salt = salt
        self.window = window
        self.kv: np.ndarray | None = None
        self.block_size = 0
        self.supported_kernel_block_sizes: list[int] | None = None

    def get_kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        common = {
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": "float32",
        }
        if self.window is None:
            return FullAttentionSpec(**common)
        return SlidingWindowSpec(**common, sliding_window=self.window)

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int) -> None:
        assert raw.dtype == torch.int8
        assert raw.shape[1] == block_size * 8
        self.kv = raw.numpy().view(np.uint64)
        self.block_size = block_size

    def __call__(self, token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        context = get_forward_context().attn_metadata
        if context is None:
            return np.zeros(len(token_ids), dtype=np.uint64)
        meta: AttentionMetadata = context[self.layer_name]
        flat = self.kv.reshape(-1)
        slots = meta.slot_mapping.numpy()
        assert len(slots) == len(token_ids) == meta.num_actual_tokens
        assert (slots >= 0).all()
        assert len(np.unique(slots)) == len(slots), "two tokens share a slot"
        flat[slots] = fingerprints(token_ids, positions, self.salt)
        out = np.zeros(len(token_ids), dtype=np.uint64)
        starts, lengths = meta.query_start_loc.numpy(), meta.seq_lens.numpy()
        assert (starts == meta.query_start_loc_cpu).all()
        assert (lengths == meta.seq_lens_cpu).all()
        table = meta.block_table_tensor.numpy()
        for i in range(meta.num_reqs):
            start, end, length = int(starts[i]), int(starts[i + 1]), int(lengths[i])
            context_length = length - (end - start)
            first = 0 if self.window is None else max(0, context_length - self.window + 1)
            keys = np.arange(first, length)
            values = flat[
                table[i, keys // self.block_size] * self.block_size + keys % self.block_size
            ]
            out[start:end] = visible_sums(values, first, context_length, length, self.window)
        return out


def visible_sums(
    values: np.ndarray, first: int, context: int, length: int, window: int | None
) -> np.ndarray:
    """Sum of `values` (of keys `first`...) that each query at `context`...`length - 1` sees."""
    sums = np.concatenate([[np.uint64(0)], values.cumsum(dtype=np.uint64)])
    queries = np.arange(context, length)
    low = np.zeros_like(queries) if window is None else np.maximum(queries - window + 1, 0)
    return sums[queries + 1 - first] - sums[low - first]


class StubModel:
    """Stands for a language model; hidden states are [T, 1] int64."""

    def __init__(self, layers: Sequence[StubLayer], vocab_size: int = VOCAB_SIZE) -> None:
        self.layers = list(layers)
        self.vocab_size = vocab_size
        self.num_logits_rows = 0
        """Rows of logits computed so far."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert input_ids.dtype == torch.int32
        assert positions.dtype == torch.int64
        ids, places = input_ids.numpy(), positions.numpy()
        hidden = np.zeros(len(ids), dtype=np.uint64)
        for layer in self.layers:
            hidden = mix(hidden + layer(ids, places))
        return torch.from_numpy(hidden.view(np.int64)).unsqueeze(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_logits_rows += hidden.shape[0]
        return torch.from_numpy(self._logits(hidden.numpy()[:, 0].view(np.uint64)))

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        ids = np.arange(self.vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = mix(hidden[:, None] + ids)
        return ((bits >> np.uint64(40)).astype(np.float64) / 2**24 * 8).astype(np.float32)

    def dense_logits(self, token_ids: list[int]) -> np.ndarray:
        """Logits [len, V] of a whole sequence, computed without a cache."""
        ids, places = np.asarray(token_ids), np.arange(len(token_ids))
        hidden = np.zeros(len(ids), dtype=np.uint64)
        for layer in self.layers:
            values = fingerprints(ids, places, layer.salt)
            hidden = mix(hidden + visible_sums(values, 0, 0, len(ids), layer.window))
        return self._logits(hidden)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` most likely tokens after `prompt`."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


GROUPS: tuple[tuple[int, int | None, int], ...] = ((4, None, 2), (8, 6, 2), (4, 5, 1))
"""Of each KV group: block size, window, layers. The pages of all are of one size below."""


def make_config(
    max_model_len: int = 64,
    max_num_seqs: int = 6,
    max_num_batched_tokens: int = 64,
    vocab_size: int = VOCAB_SIZE,
    **cache: object,
) -> JubakoConfig:
    return JubakoConfig().replace(
        model_config={
            "max_model_len": max_model_len,
            "vocab_size": vocab_size,
            "dtype": "float32",
            "architecture": "Stub",
        },
        scheduler_config={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
        },
        cache_config={"block_size": 4, **cache},
        device_config={"device": "cpu", "num_threads": 1},
    )


def make_kv_config(
    layers: Sequence[StubLayer],
    groups: Sequence[tuple[int, int | None, int]] = GROUPS,
    num_blocks: int = 200,
) -> KVCacheConfig:
    """Groups of layers in order; layer i of every group shares tensor i, as big as its largest."""
    names = [layer.layer_name for layer in layers]
    specs, members = [], []
    for block_size, _, count in groups:
        members.append([names.pop(0) for _ in range(count)])
        layer = next(x for x in layers if x.layer_name == members[-1][0])
        specs.append(layer.get_kv_cache_spec(block_size))
    tensors = []
    for i in range(max(count for _, _, count in groups)):
        # Pages of different size may not share a tensor: one tensor per size.
        by_page: dict[int, list[str]] = {}
        for spec, group in zip(specs, members):
            if i < len(group):
                by_page.setdefault(spec.page_size_bytes, []).append(group[i])
        tensors += [KVCacheTensor(page * num_blocks, shared) for page, shared in by_page.items()]
    return KVCacheConfig(
        num_blocks,
        tensors,
        [KVCacheGroupSpec(group, spec) for group, spec in zip(members, specs)],
    )


def make_runner(
    config: JubakoConfig | None = None,
    groups: Sequence[tuple[int, int | None, int]] = GROUPS,
    num_blocks: int = 200,
    custom_processors: list | None = None,
    staging: StepStaging | None = None,
    kernel_block_sizes: list[int] | None = None,
) -> ModelRunner:
    """A runner with a stub model whose KV memory is full of garbage."""
    config = config or make_config()
    layers = []
    for number, (_, window, count) in enumerate(groups):
        for i in range(count):
            layers.append(StubLayer(f"g{number}.{i}", salt=len(layers) + 1, window=window))
    for layer in layers:
        layer.supported_kernel_block_sizes = kernel_block_sizes
    runner = ModelRunner(config, torch.device("cpu"), custom_processors, staging)
    model = StubModel(layers, config.model_config.vocab_size)
    runner.use_model(model, {layer.layer_name: layer for layer in layers})
    runner.initialize_kv_cache(make_kv_config(layers, groups, num_blocks))
    garbage = np.random.default_rng(0)
    for buffer in runner.kv_buffers:
        buffer.numpy()[:] = garbage.integers(-128, 128, buffer.numel(), dtype=np.int8)
    return runner
