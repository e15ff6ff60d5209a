"""Tokens have the bytes that the tokeniser decodes them to, whatever file they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from jubako.checkpoint.gguf import GGUFFile
from jubako.checkpoint.info import Checkpoint, open_checkpoint
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.frontend.tokenizer import load_tokenizer
from jubako.structured_output.vocabulary import read_vocabulary
from tests.exactness import oracle
from tests.frontend.vocabularies import (
    byte_level_file,
    sentencepiece_file,
    trained_byte_level,
)


def check(checkpoint: Checkpoint, tokenizer: str | None = None, size: int | None = None) -> None:
    known = load_tokenizer(checkpoint, tokenizer)
    size = known.max_token_id + 40 if size is None else size
    found = read_vocabulary(checkpoint, tokenizer, size)
    assert len(found.tokens) == size
    for token, text in enumerate(found.tokens):
        assert text == known.bytes_of(token), token
    assert set(found.special) == {token for token in known.special_ids if token < size}


def folder_with(path: Path) -> Checkpoint:
    return Checkpoint(kind="hf", path=path, name="x", hf_config={})


def gguf(path: Path) -> Checkpoint:
    return Checkpoint(kind="gguf", path=path, name="x", hf_config={}, gguf=GGUFFile(path))


def test_byte_level_folder(tmp_path: Path) -> None:
    trained_byte_level().save(str(tmp_path / "tokenizer.json"))
    check(folder_with(tmp_path))
    check(folder_with(tmp_path), size=100)


def test_byte_level_gguf(tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    byte_level_file(path, trained_byte_level(), "gpt-2")
    check(gguf(path))


def test_sentencepiece_gguf(tmp_path: Path) -> None:
    check(gguf(sentencepiece_file(tmp_path)))


def test_another_tokeniser_than_the_models_own(tmp_path: Path) -> None:
    path = sentencepiece_file(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    trained_byte_level().save(str(other / "tokenizer.json"))
    check(gguf(path), str(other))
    check(gguf(path), str(other / "tokenizer.json"))
    check(folder_with(other), str(path))


def test_the_default_model() -> None:
    check(open_checkpoint(None), size=262_144)


def test_words_have_no_bytes_of_their_own(tmp_path: Path) -> None:
    oracle.write_tokenizer(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"Metaspace"', '"WordPiece"'))
    with pytest.raises(UnsupportedModelError, match="byte-level or SentencePiece"):
        read_vocabulary(folder_with(tmp_path), None, 10)


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_vocabulary(folder_with(tmp_path), None, 10)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_vocabulary(folder_with(tmp_path), None, 10)
