"""How does the vocabulary in a GGUF file become a fast tokeniser?

The metadata is turned into the JSON of the `tokenizers` library once and kept in the cache folder:
a SentencePiece vocabulary says how good each piece is, while the library wants the list of merges,
which takes a second or two to derive. Later starts only load the JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from jubako.checkpoint.gguf import GGUFArray, GGUFFile
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.utils.logging import get_logger
from jubako.utils.paths import atomic_write, cache_dir

logger = get_logger(__name__)

SPACE = "\u2581"
"""SentencePiece's visible space."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Types of tokens (`tokenizer.ggml.token_type`)."""
_FORMAT = 1
"""Part of the cache key; raised when the conversion changes."""
_DIGEST_CHARS = 64

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "command-r": (r"\p{N}", _GPT2),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_O200K,),
}
"""`tokenizer.ggml.pre` → the patterns that cut text before merging, applied one after another."""

_ADD_BOS_BY_DEFAULT = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})
"""A word that is in the vocabulary is taken whole, whatever the merges would make of it."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "command-r"})
"""Text is brought to Unicode's composed form (NFC) first."""


def load_gguf_tokenizer(file: GGUFFile) -> Backend:
    """The tokeniser of a GGUF file, from the cache folder or converted and put there.

    Raises `UnsupportedModelError` for a kind of vocabulary that is not known, `CheckpointError`
    for a damaged one. A cache that cannot be read or written costs time, nothing else.
    """
    path = _cache_path(file)
    backend = _from_cache(path)
    if backend is None:
        logger.info("Converting the tokeniser of %s (once).", file.path.name)
        text = json.dumps(tokenizer_json(file), ensure_ascii=False, separators=(",", ":")).encode()
        try:
            backend = Backend.from_buffer(text)
        except Exception as error:
            raise CheckpointError(
                f"The tokeniser in {file.path.name} is damaged: {error}."
            ) from None
        _to_cache(path, text)
    return backend


def _cache_path(file: GGUFFile) -> Path:
    header = hashlib.blake2b(file.pread(0, file.header_bytes), digest_size=16)
    header.update(b"%d" % _FORMAT)
    return cache_dir() / "tokenizers" / f"{header.hexdigest()}.json"


def _from_cache(path: Path) -> Backend | None:
    try:
        data = path.read_bytes()
        body = data[_DIGEST_CHARS:]
        if data[:_DIGEST_CHARS] != _digest(body):
            raise ValueError("wrong digest")
        return Backend.from_buffer(body)
    except FileNotFoundError:
        return None
    except Exception:  # the library raises plain Exception for bad JSON
        logger.warning("The cached tokeniser cannot be read; it is made again.")
        return None


def _to_cache(path: Path, body: bytes) -> None:
    try:
        with atomic_write(path) as file:
            file.write(_digest(body))
            file.write(body)
    except OSError as error:
        logger.warning("The tokeniser cannot be cached (%s); starts stay slow.", error.strerror)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_CHARS // 2).hexdigest().encode()


# -- conversion -------------------------------------------------------------------------------


class _Vocabulary:
    """The tokeniser's metadata, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.name = file.path.name
        self.metadata = file.metadata
        self.architecture = str(file.metadata.get("general.architecture", ""))
        tokens = self.array("tokens", strings=True)
        if tokens is None or not len(tokens):
            raise CheckpointError(f"{self.name} has no tokeniser (tokenizer.ggml.tokens).")
        self.tokens: list[str] = tokens.tolist()
        types = self.array("token_type", strings=False)
        if types is None:
            self.types = np.full(len(self.tokens), _NORMAL, np.int32)
        else:
            self.types = types.numpy()
            self.check_length("token_type", len(self.types))
        special = (self.types == _CONTROL) | (self.types == _UNKNOWN)
        self.special = set(np.flatnonzero(special).tolist())
        self.user_defined = set(np.flatnonzero(self.types == _USER_DEFINED).tolist())
        for key in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            token = self.token_id(key)
            if token is not None:
                self.special.add(token)

    def array(self, key: str, *, strings: bool) -> GGUFArray | None:
        """An array of the tokeniser, or None; `CheckpointError` if it holds something else."""
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, GGUFArray) or value.is_strings != strings:
            wanted = "strings" if strings else "numbers"
            raise CheckpointError(
                f"tokenizer.ggml.{key} of {self.name} must be an array of {wanted}."
            )
        return value

    def check_length(self, key: str, length: int) -> None:
        if length != len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key} of {self.name} has {length} entries for "
                f"{len(self.tokens)} tokens."
            )

    def token_id(self, key: str) -> int | None:
        """`tokenizer.ggml.<key>_token_id`, if it is a token."""
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int) and 0 <= value < len(self.tokens):
            return value
        return None

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))

    def ids(self) -> dict[str, int]:
        """Text → id. Of tokens with the same text the first counts."""
        ids: dict[str, int] = {}
        for token, text in enumerate(self.tokens):
            ids.setdefault(text, token)
        return ids


def tokenizer_json(file: GGUFFile) -> dict[str, Any]:
    """The content of the `tokenizer.json` that a GGUF file's metadata stands for."""
    kind = file.metadata.get("tokenizer.ggml.model")
    vocabulary = _Vocabulary(file)
    if kind == "llama":
        parts = _sentencepiece(vocabulary)
        add_bos = True
    elif kind == "gpt2":
        parts = _byte_level(vocabulary)
        add_bos = file.metadata.get("tokenizer.ggml.pre") in _ADD_BOS_BY_DEFAULT
    else:
        raise UnsupportedModelError(
            f"{vocabulary.name} has a tokeniser of kind {kind!r} (tokenizer.ggml.model); supported "
            "are 'llama' (SentencePiece BPE) and 'gpt2' (byte-level BPE)."
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, parts["model"]["vocab"]),
        "post_processor": _post_processor(vocabulary, add_bos),
        **parts,
    }


def _added_tokens(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[dict[str, Any]]:
    """Control tokens as special tokens, user-defined ones as tokens that are never cut."""
    added = vocabulary.special | vocabulary.user_defined
    return [
        {
            "id": token,
            "content": vocabulary.tokens[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in vocabulary.special,
        }
        for token in sorted(added)
        if vocabulary.tokens[token] and ids.get(vocabulary.tokens[token]) == token
    ]


def _post_processor(vocabulary: _Vocabulary, add_bos: bool) -> dict[str, Any] | None:
    before = vocabulary.token_id("bos") if vocabulary.flag("add_bos_token", add_bos) else None
    after = vocabulary.token_id("eos") if vocabulary.flag("add_eos_token", False) else None
    if before is None and after is None:
        return None
    tokens = {
        vocabulary.tokens[i]: {
            "id": vocabulary.tokens[i],
            "ids": [i],
            "tokens": [vocabulary.tokens[i]],
        }
        for i in (before, after)
        if i is not None
    }

    def template(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def special(token: int | None) -> list[dict[str, Any]]:
            if token is None:
                return []
            return [{"SpecialToken": {"id": vocabulary.tokens[token], "type_id": type_id}}]

        middle = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*special(before), middle, *special(after)]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": tokens,
    }


# -- SentencePiece ----------------------------------------------------------------------------


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    # Files of Gemma spell runs of spaces with real spaces; the text has visible ones by then.
    tokens = vocabulary.tokens
    for token in sorted(vocabulary.user_defined):
        if tokens[token] and not tokens[token].strip(" "):
            tokens[token] = SPACE * len(tokens[token])
            vocabulary.user_defined.remove(token)
    ids = vocabulary.ids()
    unknown = vocabulary.token_id("unknown")
    has_bytes = bool((vocabulary.types == _BYTE).any())
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizer: dict[str, Any] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces],
        }
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    else:
        normalizer = spaces
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "ignore_merges": False,
            "vocab": ids,
            "merges": _written_merges(derive_merges(_ranks(vocabulary))),
        },
    }


def _ranks(vocabulary: _Vocabulary) -> dict[str, int]:
    """Pieces that text may be merged into → rank, 0 the first to be merged."""
    scores = vocabulary.array("scores", strings=False)
    if scores is None:
        raise CheckpointError(f"{vocabulary.name} has no tokenizer.ggml.scores.")
    values = scores.numpy()
    vocabulary.check_length("scores", len(values))
    types = vocabulary.types
    mergeable = (types == _NORMAL) | (types == _USER_DEFINED)
    mergeable[sorted(vocabulary.special)] = False
    if vocabulary.architecture.startswith("gemma"):
        # Gemma's order of merges is the order of its ids; the scores of some files differ from it.
        order = np.arange(len(values))
    else:
        order = np.lexsort((-values, types != _USER_DEFINED))
    tokens = vocabulary.tokens
    ranks: dict[str, int] = {}
    for token in order[mergeable[order]].tolist():
        ranks.setdefault(tokens[token], len(ranks))
    return ranks


def derive_merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """For each piece the one merge that makes it, in order of rank.

    BPE merges the best-ranked adjacent pair again and again. When a piece appears in a text,
    nothing has crossed its borders before, so inside them the same merges happened as if the piece
    stood alone: only the last step of merging the lone piece can ever make it. A list of all ways
    to cut every piece in two is twice as long, loads half as fast, and gives the same tokens.
    """
    get = ranks.get
    never = len(ranks)
    known = {piece for piece in ranks if len(piece) == 1}
    merges: list[tuple[str, str]] = []
    for piece in ranks:
        if len(piece) < 2 or not known.issuperset(piece):
            continue
        parts = list(piece)
        pairs = [get(a + b, never) for a, b in itertools.pairwise(parts)]
        while len(parts) > 2:
            best = min(pairs)
            if best == never:
                break
            i = pairs.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
            del pairs[i]
            if i:
                pairs[i - 1] = get(parts[i - 1] + parts[i], never)
            if i < len(pairs):
                pairs[i] = get(parts[i] + parts[i + 1], never)
        else:
            merges.append((parts[0], parts[1]))
    return merges


def _written_merges(merges: list[tuple[str, str]]) -> list[str] | list[tuple[str, str]]:
    """As "a b", which loads a fifth faster than a pair, unless a part holds what would break it."""
    if any(" " in a or " " in b or a.startswith("#version") for a, b in merges):
        return merges
    return [f"{a} {b}" for a, b in merges]


# -- byte level -------------------------------------------------------------------------------


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    pre = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"{vocabulary.name} cuts text by the rules of {pre!r} (tokenizer.ggml.pre), which are "
            f"not known; known are {', '.join(sorted(_SPLITS))}."
        )
    merges = vocabulary.array("merges", strings=True)
    if merges is None:
        raise CheckpointError(f"{vocabulary.name} has no tokenizer.ggml.merges.")
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in _SPLITS[pre]
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": vocabulary.flag("add_space_prefix", False),
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
            "vocab": vocabulary.ids(),
            "merges": merges.tolist(),
        },
    }
