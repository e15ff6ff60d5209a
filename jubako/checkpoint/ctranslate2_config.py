"""How does a CTranslate2 folder of Whisper describe its model, in Hugging Face's names?

Sizes follow from the variables, token ids from `tokenizer.json`, suppressed tokens from
`config.json`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jubako.checkpoint.ctranslate2 import CTranslate2File
from jubako.errors import CheckpointError, UnsupportedModelError

WHISPER = "WhisperSpec"

_REQUIRED = {"pre_norm": 1, "alibi": 0, "scale_embeddings": 0}
"""Settings of the decoder → the values that make it Whisper's."""

_GELU = 3
"""The number of GELU among the activations."""


def config_from_ctranslate2(file: CTranslate2File, folder: Path) -> dict[str, Any]:
    """`config.json` as transformers would write it for the model.

    Raises `UnsupportedModelError` for other models than Whisper, and `CheckpointError` where
    variables or special tokens are missing.
    """
    if file.spec != WHISPER:
        raise UnsupportedModelError(
            f"{file.path.name} holds a CTranslate2 model of kind {file.spec!r}; supported is "
            f"{WHISPER!r}."
        )
    for name, wanted in _REQUIRED.items():
        value = file.number(f"decoder/{name}", wanted)
        if value != wanted:
            raise UnsupportedModelError(
                f"{file.path.name} sets decoder/{name}={value}; Whisper has {wanted}."
            )
    if (activation := file.number("decoder/activation", _GELU)) != _GELU:
        raise UnsupportedModelError(
            f"{file.path.name} has the activation number {activation}; supported is {_GELU}, GELU."
        )
    vocabulary, width = _shape(file, "decoder/embeddings/weight", 2)
    ids = special_tokens(folder)
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "dtype": _float_type(file),
        "activation_function": "gelu",
        "scale_embedding": False,
        "d_model": width,
        "vocab_size": vocabulary,
        "num_mel_bins": _shape(file, "encoder/conv1/weight", 3)[1],
        "max_source_positions": _shape(file, "encoder/position_encodings/encodings", 2)[0],
        "max_target_positions": _shape(file, "decoder/position_encodings/encodings", 2)[0],
        **_part(file, "encoder"),
        **_part(file, "decoder"),
        "decoder_start_token_id": _id(ids, "<|startoftranscript|>"),
        "eos_token_id": _id(ids, "<|endoftext|>"),
        "bos_token_id": _id(ids, "<|endoftext|>"),
        "pad_token_id": _id(ids, "<|endoftext|>"),
    }


def generation_from_ctranslate2(config: dict[str, Any]) -> dict[str, Any]:
    """`generation_config.json` as transformers would write it; `config` is the folder's own."""
    return {
        name: _ids(config, key)
        for name, key in (
            ("suppress_tokens", "suppress_ids"),
            ("begin_suppress_tokens", "suppress_ids_begin"),
        )
        if config.get(key)
    }


def special_tokens(folder: Path) -> dict[str, int]:
    """Ids of the tokens that `tokenizer.json` adds to the vocabulary, by their text."""
    try:
        tokens = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
        return {token["content"]: int(token["id"]) for token in tokens}
    except FileNotFoundError:
        raise CheckpointError(
            f"Folder {folder.name!r} has no tokenizer.json; copy that of the original model."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError("tokenizer.json cannot be read, or has no added_tokens.") from None


def _id(ids: dict[str, int], token: str) -> int:
    if token not in ids:
        raise CheckpointError(f"tokenizer.json lacks the token {token}, which Whisper needs.")
    return ids[token]


def _ids(config: dict[str, Any], key: str) -> list[int]:
    values = config[key]
    if not isinstance(values, list) or any(type(v) is not int for v in values):
        raise CheckpointError(f"{key} in config.json must be a list of token ids.")
    # -1 stands for all that are no words in some conversions; the list itself has them too.
    return [value for value in values if value >= 0]


def _shape(file: CTranslate2File, name: str, dims: int) -> tuple[int, ...]:
    variable = file.variables.get(name)
    if variable is None:
        raise CheckpointError(f"{file.path.name} lacks the variable {name!r}.")
    if len(variable.shape) != dims:
        raise CheckpointError(
            f"The variable {name!r} in {file.path.name} has shape {list(variable.shape)}; it must "
            f"have {dims} dimensions."
        )
    return variable.shape


def _part(file: CTranslate2File, part: str) -> dict[str, int]:
    """Sizes of the encoder or the decoder."""
    pattern = re.compile(rf"{part}/layer_(\d+)/")
    layers = {int(m[1]) for name in file.variables if (m := pattern.match(name))}
    if layers != set(range(len(layers))) or not layers:
        raise CheckpointError(f"{file.path.name} does not have every layer of its {part}.")
    heads = file.number(f"{part}/num_heads", 0)
    if heads < 1:
        raise CheckpointError(f"{file.path.name} does not say how many heads its {part} has.")
    return {
        f"{part}_layers": len(layers),
        f"{part}_attention_heads": heads,
        f"{part}_ffn_dim": _shape(file, f"{part}/layer_0/ffn/linear_0/weight", 2)[0],
    }


def _float_type(file: CTranslate2File) -> str:
    """What the parts that are never quantised are stored in."""
    _shape(file, "decoder/layer_norm/gamma", 1)
    return file.variables["decoder/layer_norm/gamma"].dtype
