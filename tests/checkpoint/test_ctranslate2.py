"""CTranslate2 files: what they say of their model, and what is said of damaged ones."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from jubako.checkpoint.ctranslate2 import CTranslate2File
from jubako.checkpoint.info import open_checkpoint
from jubako.errors import CheckpointError, JubakoError, UnsupportedModelError
from tests.checkpoint.ctranslate2_files import model_file, text, variable, write_folder

ARRAY = np.arange(12, dtype=np.float16).reshape(3, 4)
SMALL = {"a/weight": ARRAY, "a/scale": np.float32(2.5), "n": np.int16(-7), "b": np.int8(1)}


def opened(tmp_path: Path, data: bytes) -> CTranslate2File:
    (tmp_path / "model.bin").write_bytes(data)
    return CTranslate2File(tmp_path / "model.bin")


def test_variables_and_aliases(tmp_path: Path) -> None:
    file = opened(tmp_path, model_file(SMALL, {"tied": "a/weight"}))
    assert (file.spec, file.revision) == ("WhisperSpec", 3)
    assert list(file.variables) == [*SMALL, "tied"]
    found = file.variables["a/weight"]
    assert (found.shape, found.dtype, found.nbytes) == ((3, 4), "float16", 24)
    assert file.variables["tied"] is found
    raw = np.empty(24, np.uint8)
    file.read_into(found.offset, raw)
    assert (raw.view(np.float16).reshape(3, 4) == ARRAY).all()
    assert [file.number(n, 9) for n in ("n", "b", "none")] == [-7, 1, 9]
    with pytest.raises(CheckpointError, match="single integer"):
        file.number("a/weight", 0)


@pytest.mark.parametrize("version", [4, 5, 6])
def test_versions(tmp_path: Path, version: int) -> None:
    assert opened(tmp_path, model_file(SMALL, version=version)).variables


@pytest.mark.parametrize("version", [0, 3, 7, 0x46554747])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(CheckpointError, match=rf"version {version} .* 4, 5, 6"):
        opened(tmp_path, model_file(SMALL, version=version))


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    data = model_file(SMALL, {"tied": "a/weight"})
    for end in range(len(data)):
        with pytest.raises(CheckpointError, match=r"cut short|damaged"):
            opened(tmp_path, data[:end])


def test_changed_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    data = bytearray(model_file(SMALL, {"tied": "a/weight"}))
    random = np.random.default_rng(0)
    for _ in range(400):
        changed = bytearray(data)
        changed[int(random.integers(len(data)))] = int(random.integers(256))
        with contextlib.suppress(CheckpointError):
            opened(tmp_path, bytes(changed))


HEAD = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<I", 3)


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        (struct.pack("<I", 2**32 - 1), "4294967295 variables; at most 100000"),
        (struct.pack("<IH", 1, 0), "name has 0 bytes"),
        (struct.pack("<IH", 1, 60_000), "name has 60000 bytes"),
        (struct.pack("<I", 1) + struct.pack("<H", 2) + b"ab", "no name"),
        (struct.pack("<I", 1) + text("x\x07y"), "no name"),
        (struct.pack("<I", 1) + text("x") + b"\xff", "255 dimensions"),
        (struct.pack("<I", 1) + text("x") + struct.pack("<BBI", 0, 77, 4), "unknown type, 77"),
        (
            struct.pack("<I", 1) + text("x") + struct.pack("<B4IBI", 4, *[2**32 - 1] * 4, 0, 4),
            "but 4 are given",
        ),
        (
            struct.pack("<I", 1) + text("x") + struct.pack("<BIBI", 1, 2**29, 0, 2**31),
            "cut short: variable 'x' would end at byte",
        ),
        (struct.pack("<I", 2) + variable("x", np.int8(1)) * 2, "'x' twice"),
        (
            struct.pack("<I", 1) + variable("x", np.int8(1)) + struct.pack("<I", 1)
            + text("y") + text("z"),
            "alias 'y' stands for 'z'",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, rest: bytes, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        opened(tmp_path, HEAD + rest)


# -- folders ----------------------------------------------------------------------------------

WIDTH = 8
WHISPER = {
    "decoder/activation": np.int8(3),
    "decoder/pre_norm": np.int8(1),
    "decoder/num_heads": np.int16(2),
    "encoder/num_heads": np.int16(4),
    "decoder/embeddings/weight": np.zeros((50, WIDTH), np.int8),
    "decoder/layer_norm/gamma": np.zeros(WIDTH, np.float16),
    "decoder/position_encodings/encodings": np.zeros((44, WIDTH), np.float16),
    "encoder/position_encodings/encodings": np.zeros((150, WIDTH), np.float16),
    "encoder/conv1/weight": np.zeros((WIDTH, 80, 3), np.float16),
    "encoder/layer_0/ffn/linear_0/weight": np.zeros((24, WIDTH), np.float16),
    "encoder/layer_1/ffn/linear_0/weight": np.zeros((24, WIDTH), np.float16),
    "decoder/layer_0/ffn/linear_0/weight": np.zeros((32, WIDTH), np.float16),
}


def test_the_configuration_is_in_hugging_faces_names(tmp_path: Path) -> None:
    lists = {"suppress_ids": [1, 2, 40], "suppress_ids_begin": [3], "lang_ids": [7]}
    checkpoint = open_checkpoint(str(write_folder(tmp_path / "m", model_file(WHISPER), **lists)))
    assert checkpoint.kind == "ctranslate2"
    assert checkpoint.folder == tmp_path / "m"
    assert checkpoint.eos_token_ids == (0,)
    assert checkpoint.generation_config == {
        "suppress_tokens": [1, 2, 40],
        "begin_suppress_tokens": [3],
    }
    wanted = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float16",
        "d_model": WIDTH,
        "vocab_size": 50,
        "num_mel_bins": 80,
        "max_source_positions": 150,
        "max_target_positions": 44,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "decoder_start_token_id": 1,
        "eos_token_id": 0,
    }
    assert wanted.items() <= checkpoint.hf_config.items()


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"decoder/alibi": np.int8(1)}, UnsupportedModelError, "decoder/alibi=1"),
        ({"decoder/pre_norm": np.int8(0)}, UnsupportedModelError, "decoder/pre_norm=0"),
        ({"decoder/activation": np.int8(0)}, UnsupportedModelError, "activation number 0"),
        ({"decoder/embeddings/weight": None}, CheckpointError, "lacks the variable"),
        ({"encoder/conv1/weight": np.zeros(3, np.float32)}, CheckpointError, "3 dimensions"),
        ({"encoder/layer_0/ffn/linear_0/weight": None}, CheckpointError, "every layer"),
        ({"encoder/num_heads": None}, CheckpointError, "how many heads"),
    ],
)
def test_other_models_are_refused(
    tmp_path: Path, change: dict[str, object], error: type[JubakoError], told: str
) -> None:
    variables = {n: v for n, v in (WHISPER | change).items() if v is not None}
    with pytest.raises(error, match=told):
        open_checkpoint(str(write_folder(tmp_path / "m", model_file(variables))))


def test_another_kind_of_model_is_named(tmp_path: Path) -> None:
    data = model_file(WHISPER, spec="TransformerSpec")
    with pytest.raises(UnsupportedModelError, match="'TransformerSpec'; supported is 'Whisper"):
        open_checkpoint(str(write_folder(tmp_path / "m", data)))


def test_files_beside_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", model_file(WHISPER), suppress_ids="all")
    with pytest.raises(CheckpointError, match="suppress_ids"):
        open_checkpoint(str(folder))
    (folder / "config.json").unlink()
    assert open_checkpoint(str(folder)).generation_config == {}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    with pytest.raises(CheckpointError, match=r"endoftext|startoftranscript"):
        open_checkpoint(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        open_checkpoint(str(folder))
