"""What does a folder of sentence-transformers say about how its model embeds?

`modules.json` lists what comes after the transformer: pooling, and perhaps a normalisation.
https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jubako.checkpoint.info import read_json
from jubako.errors import CheckpointError, UnsupportedModelError

_MODES = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
_NAMED_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}


@dataclass(frozen=True)
class SentenceModules:
    """The modules behind the transformer, and how its texts are prepared."""

    pooling_type: str
    """LAST, CLS or MEAN."""
    normalize: bool
    max_seq_length: int | None
    """Tokens of a text; longer ones were cut there."""
    lower_case: bool


def read_modules(folder: Path) -> SentenceModules | None:
    """What `modules.json` in `folder` says; None without that file.

    Raises `CheckpointError` for damaged files, `UnsupportedModelError` for modules and poolings
    that are not built.
    """
    if not (folder / "modules.json").is_file():
        return None
    pooling_type: str | None = None
    normalize = False
    settings: dict[str, Any] = {}
    for kind, path in _modules(folder / "modules.json"):
        if kind == "Transformer":
            # The other names stand in folders made for other kinds of transformers.
            settings = read_json(folder / path / "sentence_bert_config.json", optional=True)
        elif kind == "Pooling":
            pooling_type = _pooling_type(read_json(folder / path / "config.json"))
        elif kind == "Normalize":
            normalize = True
        else:
            raise UnsupportedModelError(
                f"The model's modules.json has a module {kind!r}; supported are Transformer, "
                "Pooling and Normalize."
            )
    if pooling_type is None:
        raise UnsupportedModelError("The model's modules.json names no Pooling module.")
    length = settings.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        raise CheckpointError(f"max_seq_length must be an integer, got {length!r}.")
    return SentenceModules(
        pooling_type, normalize, length or None, bool(settings.get("do_lower_case"))
    )


def _modules(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order."""
    try:
        modules = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}.") from None
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise CheckpointError(f"{path.name} must hold a list of objects.")
    found = []
    for module in modules:
        kind, folder = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(folder, str) or _leaves(folder):
            raise CheckpointError(f"{path.name} has a module without a type, or a strange path.")
        found.append((kind.rpartition(".")[2], folder))
    return found


def _leaves(folder: str) -> bool:
    """Whether the path points outside the model's folder."""
    return Path(folder).is_absolute() or ".." in Path(folder).parts


def _pooling_type(config: dict[str, Any]) -> str:
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
        types = [_NAMED_MODES.get(named)]
    else:
        modes = [k for k, on in config.items() if k.startswith("pooling_mode_") and on is True]
        types = [_MODES.get(mode) for mode in modes]
    if len(types) != 1 or types[0] is None:
        raise UnsupportedModelError(
            f"The model pools by {' and '.join(modes) or 'nothing'}; supported is one of "
            f"{', '.join(_MODES)}."
        )
    return types[0]
