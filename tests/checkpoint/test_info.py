"""Opening a checkpoint: what is found at a path, and what is said when it is not a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from jubako.checkpoint.info import open_checkpoint
from jubako.errors import CheckpointError, JubakoError, ModelNotFoundError, UnsupportedModelError

from .gguf_files import CONTROL, NORMAL, add_sentencepiece
from .test_gguf_config import minimal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model; its weight file is empty, which opening does not notice."""
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "rope_theta": 5.0})
    )
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_hugging_face_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.kind == "hf"
    assert checkpoint.name == "my-model"
    assert checkpoint.path == checkpoint.folder == folder
    assert checkpoint.hf_config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.weight_files == (folder / "model.safetensors",)
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.generation_config == {}
    assert checkpoint.gguf is None


def test_all_ids_that_end_an_answer(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "temperature": 0.6})
    )
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.eos_token_ids == (2, 7)
    assert checkpoint.generation_config["temperature"] == 0.6


def test_rope_parameters_are_also_given_flat(folder: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    (folder / "config.json").write_text(json.dumps({"rope_parameters": rope}))
    config = open_checkpoint(str(folder)).hf_config
    assert config["rope_theta"] == 1e6
    assert config["rope_local_base_freq"] == 1e4
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    (folder / "config.json").write_text(
        json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}})
    )
    config = open_checkpoint(str(folder)).hf_config
    assert (config["rope_theta"], config["rope_scaling"]) == (3.0, None)


def test_shards_in_order_of_the_index(folder: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (folder / name).write_bytes(b"")
    index = {"weight_map": {"b": names[1], "a": names[0], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [f.name for f in open_checkpoint(str(folder)).weight_files] == [names[1], names[0]]


# -- what is wrong with it --------------------------------------------------------------------


def refusal(model: str | Path, kind: type[JubakoError], match: str) -> None:
    with pytest.raises(kind, match=match) as error:
        open_checkpoint(str(model))
    message = str(error.value)
    assert "\n" not in message
    assert not Path(model).is_absolute() or str(Path(model).parent) not in message.replace(
        repr(str(model)), ""
    )


@pytest.mark.parametrize("name", ["google/gemma-3-270m", "Qwen/Qwen2.5-0.5B"])
def test_hub_names_are_not_downloaded(name: str) -> None:
    refusal(name, ModelNotFoundError, f"'{name}'.*hub; Jubako does not download")


@pytest.mark.parametrize("name", ["", "  "])
def test_empty_name(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="empty"):
        open_checkpoint(name)


def test_nothing_there(tmp_path: Path) -> None:
    refusal(tmp_path / "none", ModelNotFoundError, "no model at")
    refusal("models/none.gguf", ModelNotFoundError, "no model at")
    refusal("bad\0name", ModelNotFoundError, "no model at")


def test_folder_without_a_model(tmp_path: Path) -> None:
    refusal(tmp_path, CheckpointError, r"no config\.json and no GGUF file")


@pytest.mark.parametrize("text", ["{", "", "\x00", '{"a": }'])
def test_config_that_is_not_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refusal(folder, CheckpointError, r"config\.json is not valid JSON")


def test_config_that_is_no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    refusal(folder, CheckpointError, "must hold a JSON object, not list")


@pytest.mark.parametrize("value", ["</s>", -1, [1, "x"], True, 1.5])
def test_bad_end_of_sequence_id(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refusal(folder, CheckpointError, r"eos_token_id in generation_config\.json must be")


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refusal(folder, CheckpointError, r"has no weights \(\*\.safetensors\)")


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refusal(folder, CheckpointError, "pickle files, which are not read")


def test_missing_shard_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    refusal(folder, CheckpointError, r"model-2\.safetensors is missing")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3, "", ["a"]])
def test_index_cannot_point_elsewhere(folder: Path, name: Any) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refusal(folder, CheckpointError, "which is no file name")


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": [1]}])
def test_index_without_a_map(folder: Path, content: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    refusal(folder, CheckpointError, "has no weight_map")


def test_quantised_folder(folder: Path) -> None:
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (folder / "config.json").write_text(json.dumps(config))
    refusal(folder, UnsupportedModelError, "quantised with 'bitsandbytes'.*awq, ")


def test_one_file_of_a_folder(folder: Path) -> None:
    refusal(folder / "model.safetensors", ModelNotFoundError, "give the folder that holds it")


# -- GGUF -------------------------------------------------------------------------------------


def test_gguf_file_and_folder_with_one(tmp_path: Path) -> None:
    minimal(tmp_path / "tiny.gguf")
    for model in (tmp_path / "tiny.gguf", tmp_path):
        checkpoint = open_checkpoint(str(model))
        assert checkpoint.kind == "gguf"
        assert checkpoint.name == "tiny"
        assert checkpoint.gguf is not None
        assert checkpoint.hf_config["model_type"] == "llama"
        assert checkpoint.weight_files == (tmp_path / "tiny.gguf",)
        assert checkpoint.folder == tmp_path


def test_folder_with_several_gguf_files(tmp_path: Path) -> None:
    minimal(tmp_path / "a.gguf")
    minimal(tmp_path / "b.gguf")
    refusal(tmp_path, ModelNotFoundError, r"2 GGUF files \(a\.gguf, b\.gguf\); name one")


def test_gguf_ids_that_end_an_answer(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        pieces = [("<unk>", 0.0, CONTROL), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
        pieces += [("<end_of_turn>", 0.0, CONTROL), ("<|im_end|>", 0.0, NORMAL)]
        pieces += [("<|eom|>", 0.0, CONTROL)]
        add_sentencepiece(writer, pieces)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 5)

    minimal(tmp_path / "m.gguf", more=more)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    # Named ids first; <end_of_turn> by its text; <|im_end|> is an ordinary token here.
    assert checkpoint.eos_token_ids == (2, 5, 3)
    assert checkpoint.generation_config["eos_token_id"] == [2, 5, 3]


def test_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello there")
    refusal(tmp_path / "notes.txt", CheckpointError, r"notes\.txt is not a GGUF file")
