"""Writes CTranslate2 files of Whisper for tests, from the format's description."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}


def text(value: str) -> bytes:
    raw = value.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def variable(name: str, value: Any, dims: int | None = None) -> bytes:
    array = np.asarray(value)
    head = struct.pack("<B", array.ndim if dims is None else dims)
    head += struct.pack(f"<{array.ndim}I", *array.shape)
    head += struct.pack("<BI", KINDS[str(array.dtype)], array.nbytes)
    return text(name) + head + array.tobytes()


def model_file(
    variables: dict[str, Any],
    aliases: dict[str, str] | None = None,
    *,
    version: int = 6,
    spec: str = "WhisperSpec",
) -> bytes:
    parts = [struct.pack("<I", version), text(spec), struct.pack("<I", 3)]
    parts.append(struct.pack("<I", len(variables)))
    parts += [variable(name, value) for name, value in variables.items()]
    parts.append(struct.pack("<I", len(aliases or {})))
    parts += [text(alias) + text(name) for alias, name in (aliases or {}).items()]
    return b"".join(parts)


SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>")


def write_folder(folder: Path, data: bytes, **config: Any) -> Path:
    """A folder with `data` as its model and a tokeniser of nothing but special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(data)
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def whisper_variables(
    state: dict[str, np.ndarray], heads: int, dtype: str = "float32"
) -> dict[str, Any]:
    """Variables of a file from tensors in transformers' names; `dtype` is that of the matrices."""
    out: dict[str, Any] = {
        "decoder/activation": np.int8(3),
        "decoder/alibi": np.int8(0),
        "decoder/alignment_heads": np.int16(1),
        "decoder/alignment_layer": np.int16(-1),
        "decoder/num_heads": np.int16(heads),
        "decoder/pre_norm": np.int8(1),
        "decoder/scale_embeddings": np.int8(0),
        "decoder/start_from_zero_embedding": np.int8(0),
        "encoder/num_heads": np.int16(heads),
    }

    def put(name: str, value: np.ndarray) -> None:
        if dtype not in ("int8", "int16") or not name.endswith("/weight"):
            plain = "float32" if dtype in ("int8", "int16") else dtype
            out[name] = value.astype(plain)
            return
        rows = np.abs(value).reshape(len(value), -1).max(axis=1)
        if dtype == "int8":
            scale = np.float32(127) / np.where(rows == 0, np.float32(127), rows)
        else:
            scale = np.float32([32767 / rows.max()])
        shape = (-1, *[1] * (value.ndim - 1))
        out[name] = np.rint(value * scale.reshape(shape)).astype(dtype)
        out[name + "_scale"] = scale if dtype == "int8" else scale[0]

    def linear(name: str, *stems: str) -> None:
        width = state[stems[0] + ".weight"].shape[0]
        weights = [state[stem + ".weight"] for stem in stems]
        biases = [state.get(stem + ".bias", np.zeros(width, np.float32)) for stem in stems]
        put(f"{name}/weight", np.concatenate(weights))
        put(f"{name}/bias", np.concatenate(biases))

    def norm(name: str, stem: str) -> None:
        put(f"{name}/gamma", state[stem + ".weight"])
        put(f"{name}/beta", state[stem + ".bias"])

    linear("encoder/conv1", "model.encoder.conv1")
    linear("encoder/conv2", "model.encoder.conv2")
    put("decoder/embeddings/weight", state["model.decoder.embed_tokens.weight"])
    for part in ("encoder", "decoder"):
        stem = f"model.{part}"
        put(f"{part}/position_encodings/encodings", state[f"{stem}.embed_positions.weight"])
        norm(f"{part}/layer_norm", f"{stem}.layer_norm")
        layers = 0
        while f"{stem}.layers.{layers}.fc1.weight" in state:
            own, name = f"{stem}.layers.{layers}", f"{part}/layer_{layers}"
            attention = f"{own}.self_attn"
            norm(f"{name}/self_attention/layer_norm", f"{own}.self_attn_layer_norm")
            linear(
                f"{name}/self_attention/linear_0",
                *(f"{attention}.{which}_proj" for which in "qkv"),
            )
            linear(f"{name}/self_attention/linear_1", f"{attention}.out_proj")
            if part == "decoder":
                attention = f"{own}.encoder_attn"
                norm(f"{name}/attention/layer_norm", f"{own}.encoder_attn_layer_norm")
                linear(f"{name}/attention/linear_0", f"{attention}.q_proj")
                linear(f"{name}/attention/linear_1", f"{attention}.k_proj", f"{attention}.v_proj")
                linear(f"{name}/attention/linear_2", f"{attention}.out_proj")
            norm(f"{name}/ffn/layer_norm", f"{own}.final_layer_norm")
            linear(f"{name}/ffn/linear_0", f"{own}.fc1")
            linear(f"{name}/ffn/linear_1", f"{own}.fc2")
            layers += 1
    return out
