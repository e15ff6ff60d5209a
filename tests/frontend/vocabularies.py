"""Small tokenisers for tests, of the kinds that models have."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jubako.checkpoint.gguf import GGUFFile
from jubako.frontend.gguf_tokenizer import tokenizer_json
from jubako.frontend.tokenizer import Tokenizer
from tests.checkpoint.gguf_files import (
    CONTROL,
    USER_DEFINED,
    add_sentencepiece,
    sentencepiece_pieces,
)
from tests.checkpoint.test_gguf_config import minimal

WORDS = [
    "th",
    "▁th",
    "▁the",
    "an",
    "and",
    "▁and",
    "in",
    "ing",
    "▁in",
    "er",
    "re",
    "▁a",
    "on",
    "at",
    "ab",
]
WORDS += ["abc", "ba", "bab", "▁▁", "日本", "日", "本", "é", ".", ",", "!", *"cdfgjklmopqsuvwxyz"]
WORDS += ["S", "T", "O", "P", "STO", "\n"]


def sentencepiece_file(folder: Path, words: Sequence[str] = WORDS, **flags: bool) -> Path:
    """A GGUF file with a SentencePiece vocabulary of the words, `<turn>` and `[tool]`."""

    def more(writer: gguf.GGUFWriter) -> None:
        pieces = sentencepiece_pieces(list(words))
        pieces += [("<turn>", 0.0, CONTROL), ("[tool]", 0.0, USER_DEFINED)]
        add_sentencepiece(writer, pieces, **flags)

    minimal(folder / "sp.gguf", more=more)
    return folder / "sp.gguf"


def from_gguf(path: Path) -> Backend:
    """The file's tokeniser, without the cache."""
    return Backend.from_str(json.dumps(tokenizer_json(GGUFFile(path))))


def sentencepiece(words: Sequence[str] = WORDS, **flags: bool) -> Tokenizer:
    """A SentencePiece tokeniser with byte fallback."""
    with tempfile.TemporaryDirectory() as folder:
        backend = from_gguf(sentencepiece_file(Path(folder), words, **flags))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(backend, special_tokens=special)


CORPUS = [
    "The quick brown fox jumps over the lazy dog 1234 times, don't you think?",
    "    def f(x):\n        return x ** 2  # 日本語 é\n\n",
    "Hello there, world! It's 3.14159... and WE'VE got HTTPServer's tests (really).",
]


def trained_byte_level(pre_tokenizer: Any = None) -> Backend:
    """Byte-level BPE trained on a few lines; ids 0 and 1 are special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def byte_level() -> Tokenizer:
    """A byte-level tokeniser."""
    return Tokenizer(trained_byte_level(), special_tokens={"eos_token": "<|endoftext|>"})


def byte_level_file(
    path: Path,
    backend: Backend,
    pre: str | None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A GGUF file with the vocabulary and merges of a byte-level tokeniser."""
    content = json.loads(backend.to_str())
    vocab = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in content["added_tokens"]}

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([text for text, _ in vocab])
        writer.add_token_types([CONTROL if text in special else 1 for text, _ in vocab])
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_eos_token_id(0)
        extra(writer)

    minimal(path, more=more)
    return path


def word_level() -> Tokenizer:
    """Words joined with spaces: a kind whose tokens have no bytes of their own."""
    words = ["<unk>", "<eos>", "one", "two", "three", "STOP"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"})
