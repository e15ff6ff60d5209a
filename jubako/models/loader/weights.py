"""Which tensors does a checkpoint hold, whatever its format?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from jubako.checkpoint.info import Checkpoint
from jubako.checkpoint.quantisation import (
    FLOAT_QUANTIZED,
    INT_QUANTIZED,
    PACK_QUANTIZED,
    float_block,
    weight_format,
)
from jubako.models.loader.awq_weights import awq_weights
from jubako.models.loader.ctranslate2_weights import ctranslate2_weights
from jubako.models.loader.fp8_weights import fp8_weights
from jubako.models.loader.gguf_weights import gguf_weights
from jubako.models.loader.gptq_weights import gptq_weights
from jubako.models.loader.int8_weights import int8_weights
from jubako.models.loader.mxfp4_weights import mxfp4_weights
from jubako.models.loader.pack_quantized_weights import pack_quantized_weights
from jubako.models.loader.safetensors_weights import safetensors_weights


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    keep_blocks: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Yield every tensor of the checkpoint under its Hugging Face name, in file order.

    Each is new memory in `dtype` on `device`, which the caller may keep; offsets of routers' scores
    stay float32, and so does what is small in a safetensors file that is not quantised. One tensor
    is read at a time, in pieces of a few megabytes, and no page of the file stays mapped. Quantised
    tensors are expanded. A GGUF file and the folder it was made from give the same tensors: Gemma's
    norms lose the 1 that the file adds, Llama's query and key rows get back their order. With
    `keep_blocks` quantised matrices of a GGUF file come as `layers.weights.StoredBlocks`.

    Raises `UnsupportedModelError` for a tensor type that cannot be expanded, before anything is
    read, and `CheckpointError` for a damaged file or a tensor with an unexpected name or dtype.
    """
    device = torch.device(device)
    if checkpoint.gguf is not None:
        yield from gguf_weights(
            checkpoint.gguf, checkpoint.hf_config, dtype, device, keep_blocks=keep_blocks
        )
        return
    if checkpoint.ctranslate2 is not None:
        yield from ctranslate2_weights(checkpoint.ctranslate2, dtype, device)
        return
    files, stored = checkpoint.weight_files, weight_format(checkpoint.hf_config)
    quantisation = checkpoint.hf_config.get("quantization_config") or {}
    if stored is None:
        yield from safetensors_weights(files, dtype, device)
    elif stored == "mxfp4":
        yield from mxfp4_weights(files, dtype, device)
    elif stored == FLOAT_QUANTIZED:
        blocks = {"weight_block_size": float_block(quantisation)}
        yield from fp8_weights(files, blocks, dtype, device)
    else:
        yield from _READERS[stored](files, quantisation, dtype, device)


_READERS = {
    "awq": awq_weights,
    "fbgemm_fp8": fp8_weights,
    "fp8": fp8_weights,
    "gptq": gptq_weights,
    INT_QUANTIZED: int8_weights,
    PACK_QUANTIZED: pack_quantized_weights,
}
