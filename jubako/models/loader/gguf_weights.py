"""How do the tensors of a GGUF file become those of the Hugging Face model it was made from?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch

from jubako.checkpoint.gguf import GGUFFile, GGUFTensor
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.kernels.cpu.packed_matrix import GGUF_KINDS
from jubako.layers.weights import StoredBlocks
from jubako.models.loader.dequantize import BLOCKS, dequantize

CHUNK_ELEMENTS = 32 * 1024
"""Elements expanded at a time. Their float32 values stay in a core's second-level cache, and torch
does not split operations of this size over threads: that is done here, with whole chunks, because a
barrier after every small operation takes milliseconds on a machine that is busy with other things.
"""

SPAN_CHUNKS = 8
"""Chunks that one thread reads and expands before it takes the next."""

MAX_THREADS = 8

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_LAYER_NAMES_OF: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA_LAYER_NAMES,
    "gemma3": _GEMMA_LAYER_NAMES,
    "llama": _LAYER_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"},
    "olmo2": _LAYER_NAMES
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": _LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": _LAYER_NAMES | {"ffn_gate_inp": "mlp.gate"},
}
"""Names within a layer, of architectures that differ from `_LAYER_NAMES`."""

_EXPERT_NAMES = {
    "llama": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    "qwen3moe": {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
    },
}
"""Tensors that hold a matrix for every expert of a layer; `{}` is the expert."""

_SUMS = ("gemma2", "gemma3")
"""Architectures whose norms multiply by 1 + w; files hold that sum."""

_INTERLEAVED = ("arcee", "llama", "granite", "mistral3", "smollm3")
"""Architectures whose rows of queries and keys are in the order of an interleaved rotation."""

_IGNORED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Read with the configuration, not as weights."""


def hf_name(architecture: str, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that is no weight.

    The name of one with every expert's matrix has `{}` for the expert.
    Raises `CheckpointError` for a name that the architecture does not have.
    """
    if name in _IGNORED:
        return None
    layer_names = _LAYER_NAMES_OF.get(architecture, _LAYER_NAMES)
    layer_names = layer_names | _EXPERT_NAMES.get(architecture, {})
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[stem]}.{kind}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in layer_names:
            return f"model.layers.{match[1]}.{layer_names[match[2]]}.{kind}"
    raise CheckpointError(f"Tensor {name!r} is unknown in GGUF architecture {architecture!r}.")


def gguf_weights(
    file: GGUFFile,
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    keep_blocks: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Every weight of the file, expanded to `dtype` on `device`. See `load_weights`.

    `config` is the checkpoint's `hf_config`. With `keep_blocks` a matrix of blocks that the
    native kernels take comes as `StoredBlocks`, its rows in their Hugging Face order.
    """
    architecture = file.metadata["general.architecture"]
    names = {name: hf_name(architecture, name) for name in file.tensors}
    for tensor in file.tensors.values():
        if tensor.type not in BLOCKS:
            raise UnsupportedModelError(
                f"Tensor {tensor.name!r} has type {tensor.type}; supported are {', '.join(BLOCKS)}."
            )
    with ThreadPoolExecutor(min(torch.get_num_threads(), MAX_THREADS)) as pool:
        for tensor in file.tensors.values():
            name = names[tensor.name]
            if name is None:
                continue
            heads = _interleaved_heads(config, architecture, tensor.name)
            if keep_blocks and len(tensor.shape) == 2 and tensor.type in GGUF_KINDS:
                yield name, _stored(file, tensor, dtype, heads)
                continue
            is_sum = architecture in _SUMS and tensor.name.endswith("norm.weight")
            weight = _expand(pool, file, tensor, dtype, -1.0 if is_sum else 0.0)
            if heads:
                weight = _unpermute(weight, heads, tensor.name)
            if "{}" in name:
                for expert, part in enumerate(weight):
                    yield name.format(expert), part.to(device)
                continue
            yield name, weight.to(device)


def _stored(file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype, heads: int) -> StoredBlocks:
    """The matrix's blocks, row by row."""
    rows, columns = tensor.shape
    elements, nbytes = BLOCKS[tensor.type]
    data = torch.empty((rows, columns // elements * nbytes), dtype=torch.uint8)
    file.read_into(tensor.offset, data.numpy())
    if heads:
        data = _unpermute(data, heads, tensor.name)

    def expand(data: torch.Tensor) -> torch.Tensor:
        out = torch.empty((data.shape[0], columns), dtype=dtype)
        blocks, flat = data.view(-1, nbytes), out.view(-1, elements)
        step = max(1, CHUNK_ELEMENTS // elements)
        for start in range(0, len(blocks), step):
            values = dequantize(blocks[start : start + step], tensor.type)
            flat[start : start + step].copy_(values.view(-1, elements))
        return out

    return StoredBlocks(data, tensor.type, tensor.shape, expand)


def _expand(
    pool: Executor, file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype, shift: float
) -> torch.Tensor:
    """The tensor's values plus `shift`; the sum is made in float32, then rounded to `dtype`."""
    out = torch.empty(tensor.shape, dtype=dtype)
    flat = out.view(-1)
    elements, nbytes = BLOCKS[tensor.type]
    blocks = tensor.numel // elements
    step = max(1, CHUNK_ELEMENTS // elements)
    span = step * SPAN_CHUNKS

    def expand(first: int) -> None:
        last = min(first + span, blocks)
        raw = torch.empty((last - first, nbytes), dtype=torch.uint8)
        file.read_into(tensor.offset + first * nbytes, raw.numpy())
        for start in range(first, last, step):
            end = min(start + step, last)
            values = dequantize(raw[start - first : end - first], tensor.type).view(-1)
            if shift:
                values = values.float() + shift
            flat[start * elements : end * elements].copy_(values)

    if blocks <= span:
        expand(0)
    else:
        for _ in pool.map(expand, range(0, blocks, span)):
            pass
    return out


def _interleaved_heads(config: dict[str, Any], architecture: str, name: str) -> int:
    """Heads whose rows are stored in the order of an interleaved rotation; 0: none."""
    if architecture not in _INTERLEAVED:
        return 0
    if re.search(r"\.attn_q\.(weight|bias)$", name):
        return int(config["num_attention_heads"])
    if re.search(r"\.attn_k\.(weight|bias)$", name):
        return int(config["num_key_value_heads"])
    return 0


def _unpermute(weight: torch.Tensor, heads: int, name: str) -> torch.Tensor:
    """Rows (0, h/2), (1, h/2+1), ... of each head back to 0, 1, ..., h-1."""
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"Tensor {name!r} has {rows} rows, which do not fit {heads} heads.")
    pairs = weight.view(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
