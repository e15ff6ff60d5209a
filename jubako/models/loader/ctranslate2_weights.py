"""How do the variables of a CTranslate2 file become the tensors of the Whisper they were made from?

Queries, keys and values lie in one matrix there, keys and values in one where the decoder looks at
the encoder. Quantised matrices are `round(weight * scale)`: int8 with a scale for every row, int16
with one for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch

from jubako.checkpoint.ctranslate2 import CTranslate2File, Variable
from jubako.errors import CheckpointError, UnsupportedModelError

CHUNK_BYTES = 4 * 1024 * 1024

_FLOATS = ("float32", "float16", "bfloat16")
_QUANTISED = ("int8", "int16")

_GLOBAL_NAMES = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "encoder/position_encodings": "model.encoder.embed_positions",
    "decoder/embeddings": "model.decoder.embed_tokens",
    "decoder/position_encodings": "model.decoder.embed_positions",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "decoder/projection": "proj_out",
}

_LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""Names within a layer → those of the equal parts that the rows make."""

_KINDS = {
    "weight": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "encodings": "weight",
}

_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(.+)")


def hf_names(name: str) -> tuple[str, ...]:
    """Hugging Face names of the equal parts of a variable; none for the scales of one.

    Raises `CheckpointError` for a name that Whisper does not have.
    """
    stem, _, kind = name.rpartition("/")
    if kind == "weight_scale":
        return ()
    if kind in _KINDS:
        match = _LAYER.fullmatch(stem)
        if match and match[3] in _LAYER_NAMES:
            prefix = f"model.{match[1]}.layers.{match[2]}"
            return tuple(f"{prefix}.{part}.{_KINDS[kind]}" for part in _LAYER_NAMES[match[3]])
        if stem in _GLOBAL_NAMES:
            return (f"{_GLOBAL_NAMES[stem]}.{_KINDS[kind]}",)
    raise CheckpointError(f"Variable {name!r} is unknown in a CTranslate2 file of Whisper.")


def ctranslate2_weights(
    file: CTranslate2File, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the file, expanded to `dtype` on `device`. See `load_weights`.

    The biases of keys, which are 0 in a Whisper, are left out, and so is the output matrix where
    it is that of the embeddings.
    """
    # A single number is a setting: those that change the model were looked at with its config.
    names = {name: hf_names(name) for name, v in file.variables.items() if v.shape}
    for name, parts in names.items():
        variable = file.variables[name]
        if parts and variable.dtype not in _FLOATS + _QUANTISED:
            raise UnsupportedModelError(
                f"Variable {name!r} is of type {variable.dtype}; supported are "
                f"{', '.join(_FLOATS + _QUANTISED)}."
            )
    for name, parts in names.items():
        variable = file.variables[name]
        is_tied = variable is file.variables.get("decoder/embeddings/weight")
        if not parts or (is_tied and name == "decoder/projection/weight"):
            continue
        weight = _expand(file, variable, _scales(file, name), dtype)
        if weight.shape[0] % len(parts):
            raise CheckpointError(
                f"Variable {name!r} has shape {list(variable.shape)}, which does not make "
                f"{len(parts)} equal parts."
            )
        for part, piece in zip(parts, weight.chunk(len(parts)) if len(parts) > 1 else [weight]):
            if not part.endswith("k_proj.bias"):
                yield part, piece.to(device)
            elif piece.any():
                raise CheckpointError(f"Variable {name!r} has a bias of keys, which is not 0.")


def _scales(file: CTranslate2File, name: str) -> torch.Tensor | None:
    """What a variable's rows were multiplied by: float32 [rows or 1]; None if it is not quantised.

    Raises `CheckpointError` where scales are missing, misshapen, or not above 0.
    """
    variable, stem = file.variables[name], f"{name}_scale"
    if variable.dtype not in _QUANTISED:
        return None
    scale = file.variables.get(stem)
    if scale is None or scale.dtype not in _FLOATS:
        raise CheckpointError(f"Variable {name!r} is quantised, but has no scales {stem!r}.")
    values = _expand(file, scale, None, torch.float32).reshape(-1)
    if len(values) not in (1, variable.shape[0] if variable.shape else 1):
        raise CheckpointError(
            f"Variable {stem!r} has {len(values)} scales for {list(variable.shape)} of {name!r}."
        )
    if not bool((values.isfinite() & (values > 0)).all()):
        raise CheckpointError(f"Variable {stem!r} has scales that are not above 0.")
    return values


def _expand(
    file: CTranslate2File, variable: Variable, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The variable's values in new memory, made of whole rows a few megabytes at a time."""
    out = torch.empty(variable.shape, dtype=dtype)
    stored: torch.dtype = getattr(torch, variable.dtype)
    rows = out.view(-1, 1) if out.dim() < 2 else out.view(out.shape[0], -1)
    if not rows.numel():
        return out
    row_bytes = rows.shape[1] * stored.itemsize
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        count = min(step, len(rows) - start)
        raw = np.empty(count * row_bytes, np.uint8)
        file.read_into(variable.offset + start * row_bytes, raw)
        values = torch.from_numpy(raw).view(stored).view(count, -1)
        if scales is not None:
            own = scales if len(scales) == 1 else scales[start : start + count, None]
            values = values.float() / own
        rows[start : start + count].copy_(values)
    return out
