"""Which model is at a path? Its format, configuration and files, and what ends its answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jubako.checkpoint import default_model
from jubako.checkpoint.ctranslate2 import CTranslate2File
from jubako.checkpoint.gguf import MAGIC, GGUFArray, GGUFFile
from jubako.checkpoint.gguf_config import config_from_gguf
from jubako.checkpoint.quantisation import weight_format
from jubako.errors import CheckpointError, ModelNotFoundError

END_OF_TURN_TOKENS = (
    "<end_of_turn>",
    "<turn|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end_of_turn|>",
    "<EOT>",
)
"""Control tokens that end an answer whatever the metadata names; llama.cpp stops there too."""

CTRANSLATE2_FILE = "model.bin"

_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. Nothing but headers and small files has been read."""

    kind: Literal["hf", "gguf", "ctranslate2"]
    path: Path
    """The folder, or the GGUF file."""
    name: str
    """For display and as the served name; no path."""
    hf_config: dict[str, Any]
    """In the names of Hugging Face's `config.json`."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends an answer; the first is the end-of-sequence token proper."""
    weight_files: tuple[Path, ...] = ()
    gguf: GGUFFile | None = None
    ctranslate2: CTranslate2File | None = None

    @property
    def folder(self) -> Path:
        """Where files beside the weights are looked for."""
        return self.path.parent if self.kind == "gguf" else self.path


def open_checkpoint(model: str | None = None) -> Checkpoint:
    """Open the model at a path: a Hugging Face folder, a GGUF file, or a folder with just one.

    None is the default model. Raises `ModelNotFoundError` where nothing is at the path,
    `CheckpointError` where a file is missing or damaged, `UnsupportedModelError` for a model that
    can be read but not run.
    """
    if model is None:
        return _open_gguf(default_model.default_model_path(), default_model.NAME)
    if not model.strip():
        raise ModelNotFoundError("The name of the model is empty; give a folder or a GGUF file.")
    path = Path(model).expanduser()
    try:
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, ValueError):
        is_file = is_dir = False
    if is_file:
        return _open_file(path)
    if is_dir:
        return _open_folder(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not path.suffix == ".gguf":
        raise ModelNotFoundError(
            f"There is no folder {model!r}. It looks like a name on the Hugging Face hub; Jubako "
            "does not download models. Download it first, for example with "
            f"`hf download {model} --local-dir DIR`, and give that folder."
        )
    raise ModelNotFoundError(
        f"There is no model at {model!r}; give a Hugging Face folder or a GGUF file. "
        "Jubako does not download models."
    )


def _open_file(path: Path) -> Checkpoint:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.") from None
    if magic != MAGIC and path.suffix in (".safetensors", ".json"):
        raise ModelNotFoundError(
            f"{path.name} is one file of a model; give the folder that holds it."
        )
    return _open_gguf(path, path.name.removesuffix(".gguf"))


def _open_folder(path: Path) -> Checkpoint:
    name = path.name or path.resolve().name
    if (path / CTRANSLATE2_FILE).is_file():
        return _open_ctranslate2(path, name)
    if (path / "config.json").is_file():
        return _open_hf(path, name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0], ggufs[0].name.removesuffix(".gguf"))
    if ggufs:
        names = ", ".join(p.name for p in ggufs[:5]) + (", ..." if len(ggufs) > 5 else "")
        raise ModelNotFoundError(
            f"Folder {name!r} holds {len(ggufs)} GGUF files ({names}); name one of them."
        )
    raise CheckpointError(
        f"Folder {name!r} has no config.json and no GGUF file, so it is no model."
    )


# -- Hugging Face folders ---------------------------------------------------------------------


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} where it is optional and missing. Raises `CheckpointError`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise CheckpointError(f"{path.name} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object, not {type(value).__name__}.")
    return value


def _open_hf(path: Path, name: str) -> Checkpoint:
    config = read_json(path / "config.json")
    weight_format(config)  # what cannot be read is refused at once
    generation = read_json(path / "generation_config.json", optional=True)
    ids = [*_token_ids(config, "config.json"), *_token_ids(generation, "generation_config.json")]
    return Checkpoint(
        kind="hf",
        path=path,
        name=name,
        hf_config=_with_flat_rope(config),
        generation_config=generation,
        eos_token_ids=tuple(dict.fromkeys(ids)),
        weight_files=_safetensors_files(path, name),
    )


def _token_ids(config: dict[str, Any], file: str) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(
            f"eos_token_id in {file} must be a token id or a list, got {value!r}."
        )
    return ids


def _with_flat_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Add the flat rope names of transformers 4 where only `rope_parameters` is given."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" in config:
        return config
    local = rope.get("sliding_attention")
    main = rope.get("full_attention", rope)
    flat: dict[str, Any] = {}
    if isinstance(main, dict) and "rope_theta" in main:
        flat["rope_theta"] = main["rope_theta"]
        rest = {k: v for k, v in main.items() if k != "rope_theta"}
        flat["rope_scaling"] = None if rest.get("rope_type", "default") == "default" else rest
    if isinstance(local, dict) and "rope_theta" in local:
        flat["rope_local_base_freq"] = local["rope_theta"]
    return flat | config


def _safetensors_files(path: Path, name: str) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index.name} has no weight_map.")
        for file in weight_map.values():
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise CheckpointError(f"{index.name} names {file!r}, which is no file name.")
        names = list(dict.fromkeys(weight_map.values()))
        for file in names:
            if not (path / file).is_file():
                raise CheckpointError(
                    f"Weight file {file} is missing, which {index.name} names. Download it again."
                )
        return tuple(path / file for file in names)
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    files = sorted(path.glob("*.safetensors"))
    if files:
        return tuple(f for f in files if not f.name.startswith("consolidated")) or tuple(files)
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise CheckpointError(
            f"Folder {name!r} has its weights in pickle files, which are not read because they can "
            "run code. Convert them to safetensors."
        )
    raise CheckpointError(f"Folder {name!r} has no weights (*.safetensors).")


# -- CTranslate2 ------------------------------------------------------------------------------


def _open_ctranslate2(path: Path, name: str) -> Checkpoint:
    # Few models are in this format: others need not wait for it to be imported.
    from jubako.checkpoint import ctranslate2_config

    file = CTranslate2File(path / CTRANSLATE2_FILE)
    config = ctranslate2_config.config_from_ctranslate2(file, path)
    own = read_json(path / "config.json", optional=True)
    generation = read_json(path / "generation_config.json", optional=True)
    return Checkpoint(
        kind="ctranslate2",
        path=path,
        name=name,
        hf_config=config,
        generation_config=ctranslate2_config.generation_from_ctranslate2(own) | generation,
        eos_token_ids=(config["eos_token_id"],),
        weight_files=(file.path,),
        ctranslate2=file,
    )


# -- GGUF -------------------------------------------------------------------------------------


def _open_gguf(path: Path, name: str) -> Checkpoint:
    file = GGUFFile(path)
    ids = _gguf_eos_token_ids(file)
    config = config_from_gguf(file)
    generation: dict[str, Any] = {}
    if ids:
        generation["eos_token_id"] = list(ids)
    if "bos_token_id" in config:
        generation["bos_token_id"] = config["bos_token_id"]
    return Checkpoint(
        kind="gguf",
        path=path,
        name=name,
        hf_config=config,
        generation_config=generation,
        eos_token_ids=ids,
        weight_files=(path,),
        gguf=file,
    )


def _gguf_eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """The ids that the metadata names, then control tokens known to end a turn."""
    ids: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token = file.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token, int) and not isinstance(token, bool):
            ids.append(token)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, GGUFArray) and tokens.is_strings:
        kinds = types.numpy() if isinstance(types, GGUFArray) and not types.is_strings else None
        for token in tokens.find(END_OF_TURN_TOKENS).values():
            if kinds is None or token >= len(kinds) or kinds[token] in (_CONTROL, _USER_DEFINED):
                ids.append(token)
    return tuple(dict.fromkeys(ids))
