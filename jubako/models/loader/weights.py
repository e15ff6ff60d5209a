"""Which tensors does a checkpoint hold, whatever its format?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jubako.checkpoint.info import Checkpoint
from jubako.models.loader.gguf_weights import gguf_weights
from jubako.models.loader.safetensors_weights import safetensors_weights


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint under its Hugging Face name, in file order.

    Each is new memory in `dtype` on `device`, which the caller may keep. One tensor is read at a
    time, in pieces of about a megabyte, and no page of the file stays mapped. A GGUF file and the
    folder it was made from give the same tensors: quantised ones are expanded, Gemma's norms lose
    the 1 that the file adds, Llama's query and key rows get back their order.

    Raises `UnsupportedModelError` for a tensor type that cannot be expanded, before anything is
    read, and `CheckpointError` for a damaged file or a tensor with an unexpected name or dtype.
    """
    device = torch.device(device)
    if checkpoint.gguf is not None:
        yield from gguf_weights(checkpoint.gguf, checkpoint.hf_config, dtype, device)
    else:
        yield from safetensors_weights(checkpoint.weight_files, dtype, device)
