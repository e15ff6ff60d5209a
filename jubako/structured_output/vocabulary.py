"""Which bytes does each token of a model's vocabulary add to a text?

Read from the model's files without building a tokeniser: a grammar needs no more than the bytes,
and the process that computes has no other use for a tokeniser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jubako.checkpoint.gguf import MAGIC, GGUFArray, GGUFFile
from jubako.checkpoint.info import Checkpoint
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.utils.token_spelling import byte_level_bytes, sentencepiece_bytes, spelling_of

_UNKNOWN, _CONTROL = 2, 3
"""Types of tokens in GGUF files that are no text."""
_NAMED = ("bos", "eos", "eot", "eom", "unknown", "padding")
_GGUF_SPELLINGS = {"llama": sentencepiece_bytes, "gpt2": byte_level_bytes}


class Vocabulary(NamedTuple):
    """The bytes of each token, empty for ids without one, and the ids that are never text."""

    tokens: list[bytes]
    special: list[int]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


def read_vocabulary(checkpoint: Checkpoint, tokenizer: str | None, size: int) -> Vocabulary:
    """The first `size` tokens of a checkpoint, or of the tokeniser at the path `tokenizer`.

    Raises `CheckpointError` for damaged files and `UnsupportedModelError` for a tokeniser whose
    tokens have no bytes of their own.
    """
    if tokenizer is None:
        if checkpoint.gguf is not None:
            return _of_gguf(checkpoint.gguf, size)
        return _of_json(checkpoint.path / "tokenizer.json", size)
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        return _of_json(path / "tokenizer.json", size)
    with open(path, "rb") as file:
        is_gguf = file.read(4) == MAGIC
    return _of_gguf(GGUFFile(path), size) if is_gguf else _of_json(path, size)


def _of_json(path: Path, size: int) -> Vocabulary:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}.") from None
    spelling = spelling_of(file.decoder)
    if spelling is None:
        raise _unsupported(path.name)
    vocab = file.model.vocab
    pairs: Iterable[tuple[str, int]]
    if isinstance(vocab, dict):
        pairs = vocab.items()
    else:
        pairs = ((piece, i) for i, (piece, _) in enumerate(vocab))
    tokens = [b""] * size
    for text, token in pairs:
        if 0 <= token < size:
            tokens[token] = spelling.to_bytes(text)
    special: list[int] = []
    for added in file.added_tokens:
        if 0 <= added.id < size:
            tokens[added.id] = spelling.to_bytes(added.content)
            if added.special:
                special.append(added.id)
    return Vocabulary(tokens, special)


def _of_gguf(file: GGUFFile, size: int) -> Vocabulary:
    metadata = file.metadata
    texts = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, GGUFArray) or not texts.is_strings:
        raise CheckpointError(f"{file.path.name} has no tokeniser (tokenizer.ggml.tokens).")
    to_bytes: Callable[[str], bytes] | None
    to_bytes = _GGUF_SPELLINGS.get(str(metadata.get("tokenizer.ggml.model")))
    if to_bytes is None:
        raise _unsupported(file.path.name)
    tokens = [to_bytes(text) for text in texts.tolist()[:size]]
    tokens += [b""] * (size - len(tokens))
    types = metadata.get("tokenizer.ggml.token_type")
    special: set[int] = set()
    if isinstance(types, GGUFArray) and not types.is_strings:
        special.update(np.flatnonzero(np.isin(types.numpy(), (_UNKNOWN, _CONTROL))).tolist())
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED)
    special.update(token for token in named if isinstance(token, int))
    return Vocabulary(tokens, sorted(token for token in special if token < size))


def _unsupported(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Structured outputs need a byte-level or SentencePiece tokeniser; that of {name} is of "
        "another kind."
    )
