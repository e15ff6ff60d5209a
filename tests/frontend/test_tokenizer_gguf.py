"""Tokenisers made from GGUF metadata: merges, special tokens, splitting, the cache, refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from jubako.checkpoint import default_model
from jubako.checkpoint.gguf import GGUFFile
from jubako.checkpoint.info import open_checkpoint
from jubako.errors import CheckpointError, JubakoError, UnsupportedModelError
from jubako.frontend import gguf_tokenizer
from jubako.frontend.gguf_tokenizer import derive_merges, load_gguf_tokenizer, tokenizer_json
from jubako.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoint.gguf_files import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    add_sentencepiece,
    sentencepiece_pieces,
)
from tests.checkpoint.test_gguf_config import minimal

from . import vocabularies

# -- the default model ------------------------------------------------------------------------

ENCODINGS = json.loads((Path(__file__).parent / "gemma3_encodings.json").read_text())
"""Made by transformers 5.24 from the same GGUF file."""


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    pytest.importorskip(default_model.PACKAGE)
    return load_tokenizer(open_checkpoint())


@pytest.mark.parametrize("case", ENCODINGS, ids=lambda case: ascii(case["text"][:20]))
def test_gemma_encodes_as_transformers_does(gemma: Tokenizer, case: dict[str, Any]) -> None:
    assert gemma.encode(case["text"]) == case["ids"]
    # Without the beginning-of-sequence token, which is the only one that is added.
    assert gemma.encode(case["text"], add_special_tokens=False) == case["ids"][1:]


def test_gemma_text_comes_back(gemma: Tokenizer) -> None:
    for case in ENCODINGS:
        if "<" not in case["text"] and "▁" not in case["text"]:
            assert gemma.decode(gemma.encode(case["text"])) == case["text"]


def test_gemma_special_tokens(gemma: Tokenizer) -> None:
    assert (gemma.bos_token_id, gemma.eos_token_id, gemma.max_token_id) == (2, 1, 262143)
    assert gemma.id_to_token(106) == "<end_of_turn>"
    assert gemma.is_special(106)
    assert not gemma.is_special(107)  # a newline, which is added but not special
    assert gemma.chat_template is not None


# -- SentencePiece ----------------------------------------------------------------------------


def sentencepiece_by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: merge the adjacent pair of best score, the leftmost of equals."""
    parts = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        scored = [pair for pair in pairs if pair[0] is not None]
        if not scored:
            return parts
        at = -max(scored)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


ALPHABET = "ab▁é"
pieces = st.lists(st.text(ALPHABET, min_size=2, max_size=6), min_size=1, max_size=40, unique=True)


@settings(max_examples=300, deadline=None)
@given(words=pieces, texts=st.lists(st.text("ab é", max_size=40), min_size=1, max_size=5))
def test_derived_merges_give_sentencepiece_tokens(words: list[str], texts: list[str]) -> None:
    tokens = [*ALPHABET, *words]
    ranks = {word: rank for rank, word in enumerate([*words, *ALPHABET])}
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = derive_merges(ranks)
    assert len({a + b for a, b in merges}) == len(merges) <= len(words)
    model = {"type": "BPE", "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]}
    backend = Backend.from_str(json.dumps({"version": "1.0", "model": model}))
    for text in texts:
        text = text.replace(" ", "▁")
        expected = sentencepiece_by_definition(text, {w: -float(r) for w, r in ranks.items()})
        assert backend.encode(text).tokens == expected


def test_prefix_space_and_what_is_added(tmp_path: Path) -> None:
    backend = vocabularies.from_gguf(vocabularies.sentencepiece_file(tmp_path))
    assert backend.encode("the and").tokens == ["<s>", "▁the", "▁and"]
    assert backend.encode("the", add_special_tokens=False).tokens == ["▁the"]
    assert backend.decode(backend.encode("the and").ids) == "the and"


def test_no_prefix_space(tmp_path: Path) -> None:
    path = vocabularies.sentencepiece_file(tmp_path, add_space_prefix=False)
    backend = vocabularies.from_gguf(path)
    assert backend.encode(" the and").tokens == ["<s>", "▁the", "▁and"]
    assert backend.decode(backend.encode(" the and").ids) == " the and"


def test_flags_of_the_file(tmp_path: Path) -> None:
    path = vocabularies.sentencepiece_file(tmp_path, add_bos_token=False, add_eos_token=True)
    backend = vocabularies.from_gguf(path)
    assert backend.encode("the").tokens == ["▁the", "</s>"]


def test_characters_out_of_the_vocabulary_become_bytes(tmp_path: Path) -> None:
    tokenizer = vocabularies.sentencepiece(add_bos_token=False)
    ids = tokenizer.encode("ß€")
    assert [tokenizer.id_to_token(i) for i in ids] == [
        "▁",
        "<0xC3>",
        "<0x9F>",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
    ]
    assert tokenizer.decode(ids) == "ß€"


def test_without_bytes_they_are_unknown(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer, sentencepiece_pieces(["ab"], with_bytes=False))

    minimal(tmp_path / "m.gguf", more=more)
    backend = vocabularies.from_gguf(tmp_path / "m.gguf")
    assert backend.encode("ab€€").tokens == ["<s>", "<unk>", "ab", "<unk>"]


def test_control_and_user_defined_tokens_are_never_cut(tmp_path: Path) -> None:
    backend = vocabularies.from_gguf(
        vocabularies.sentencepiece_file(tmp_path, add_space_prefix=False)
    )
    ids = backend.encode("the<turn>in[tool]").ids
    assert [backend.id_to_token(i) for i in ids] == [
        "<s>",
        *("th", "e"),
        "<turn>",
        "in",
        "[tool]",
    ]
    assert backend.decode(ids, skip_special_tokens=True) == "thein[tool]"


def test_byte_tokens_are_not_matched_as_text(tmp_path: Path) -> None:
    tokenizer = vocabularies.sentencepiece(["<0", "x0A>", "<0x0A>x"])
    assert "<0x0A>" not in [tokenizer.id_to_token(i) for i in tokenizer.encode("<0x0A>")]


# -- byte level -------------------------------------------------------------------------------

TEXTS = [
    *vocabularies.CORPUS,
    "",
    "12345678 a1b22c333",
    "I'LL we've It's  two   spaces\n\n\n\ttabs \r\n ends ",
    "Ünïcödé 日本語 🎉 <|im_end|>done<|endoftext|>",
    "CamelCaseWORDS don't/stop\n/x",
]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
def test_splitting_is_that_of_transformers(tmp_path: Path, pre: str) -> None:
    from transformers import AutoTokenizer

    path = vocabularies.byte_level_file(tmp_path / "m.gguf", vocabularies.trained_byte_level(), pre)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = vocabularies.from_gguf(path)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text), text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["smollm", "refact", "command-r"])
def test_digits_one_by_one(tmp_path: Path, pre: str) -> None:
    path = vocabularies.byte_level_file(tmp_path / "m.gguf", vocabularies.trained_byte_level(), pre)
    backend = vocabularies.from_gguf(path)
    assert backend.encode("1234").tokens == ["1", "2", "3", "4"]
    assert backend.encode("a 12").tokens[-3:] == ["Ġ", "1", "2"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-4o", ["Camel", "Case", "ĠDON'T", "Ġ", "123", "45", "Ġx"]),
        ("dbrx", ["CamelCase", "ĠDON", "'T", "Ġ", "123", "45", "Ġx"]),
    ],
)
def test_cutting_by_the_rules_of_tiktoken(tmp_path: Path, pre: str, expected: list[str]) -> None:
    path = vocabularies.byte_level_file(tmp_path / "m.gguf", vocabularies.trained_byte_level(), pre)
    pieces = vocabularies.from_gguf(path).pre_tokenizer.pre_tokenize_str("CamelCase DON'T 12345 x")
    assert [piece for piece, _ in pieces] == expected


def test_default_cuts_digits_in_threes(tmp_path: Path) -> None:
    for name, pre in (("a", None), ("b", "default")):
        path = vocabularies.byte_level_file(
            tmp_path / f"{name}.gguf", vocabularies.trained_byte_level(), pre
        )
        pieces = vocabularies.from_gguf(path).pre_tokenizer.pre_tokenize_str("ab 12345, don't")
        assert [piece for piece, _ in pieces] == [*("ab", "Ġ", "123", "45", ",", "Ġdon", "'", "t")]


def test_llama3_adds_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    backend = vocabularies.trained_byte_level()
    for name, pre, flag, expected in (
        ("a", "llama-bpe", None, [1]),
        ("b", "llama-bpe", False, []),
        ("c", "qwen2", None, []),
        ("d", "qwen2", True, [1]),
    ):

        def extra(writer: gguf.GGUFWriter, flag: bool | None = flag) -> None:
            writer.add_bos_token_id(1)
            if flag is not None:
                writer.add_add_bos_token(flag)

        path = vocabularies.byte_level_file(tmp_path / f"{name}.gguf", backend, pre, extra)
        assert vocabularies.from_gguf(path).encode("").ids == expected


def test_qwen_composes_characters(tmp_path: Path) -> None:
    path = vocabularies.byte_level_file(
        tmp_path / "m.gguf", vocabularies.trained_byte_level(), "qwen2"
    )
    backend = vocabularies.from_gguf(path)
    assert backend.encode("e\u0301").ids == backend.encode("é").ids


# -- refusals ---------------------------------------------------------------------------------


def refused(tmp_path: Path, more: Any, kind: type[JubakoError], match: str) -> None:
    minimal(tmp_path / "m.gguf", more=more)
    with pytest.raises(kind, match=match):
        load_gguf_tokenizer(GGUFFile(tmp_path / "m.gguf"))


@pytest.fixture(autouse=True)
def own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "gemma" not in request.fixturenames:
        monkeypatch.setenv("JUBAKO_CACHE_DIR", str(tmp_path / "cache"))


def test_unknown_splitting_is_named(tmp_path: Path) -> None:
    path = vocabularies.byte_level_file(
        tmp_path / "m.gguf", vocabularies.trained_byte_level(), "my-own-pre"
    )
    with pytest.raises(UnsupportedModelError, match=r"rules of 'my-own-pre'.*known are .*qwen2"):
        load_gguf_tokenizer(GGUFFile(path))


def test_unknown_kind_is_named(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["a"])

    refused(tmp_path, more, UnsupportedModelError, "of kind 't5'.*'llama'.*'gpt2'")


def test_no_tokeniser_at_all(tmp_path: Path) -> None:
    refused(tmp_path, lambda w: w.add_tokenizer_model("llama"), CheckpointError, "no tokeniser")


def test_arrays_of_different_lengths(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.0])

    refused(tmp_path, more, CheckpointError, "scores of m.gguf has 1 entries for 2 tokens")


def test_missing_scores_and_merges(tmp_path: Path) -> None:
    for kind, match in (("llama", "scores"), ("gpt2", "merges")):

        def more(writer: gguf.GGUFWriter, kind: str = kind) -> None:
            writer.add_tokenizer_model(kind)
            writer.add_token_list(["a", "b"])

        refused(tmp_path, more, CheckpointError, rf"no tokenizer\.ggml\.{match}")


def test_merge_of_unknown_tokens(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a c"])

    refused(tmp_path, more, CheckpointError, r"tokeniser in m\.gguf is damaged")


def test_tokens_that_are_no_strings(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_array("tokenizer.ggml.tokens", [1, 2])

    refused(tmp_path, more, CheckpointError, "tokens of m.gguf must be an array of strings")


def test_repeated_and_empty_tokens_are_survived(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        tokens = [("<unk>", 0.0, UNKNOWN), ("a", 0.0, NORMAL), ("a", 0.0, NORMAL)]
        add_sentencepiece(writer, [*tokens, ("", 0.0, CONTROL), ("▁", 0.0, NORMAL)])

    minimal(tmp_path / "m.gguf", more=more)
    backend = vocabularies.from_gguf(tmp_path / "m.gguf")
    assert backend.encode("a").ids == [4, 1]


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(flips=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), max_size=4))
def test_damaged_metadata_is_refused_or_survived(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    path = tmp_path / "sp.gguf"
    if not path.exists():
        vocabularies.sentencepiece_file(tmp_path)
    data = bytearray(path.read_bytes())
    end = GGUFFile(path).header_bytes
    for at, value in flips:
        data[24 + at % (end - 24)] = value
    (tmp_path / "damaged.gguf").write_bytes(data)
    try:
        tokenizer = load_tokenizer(open_checkpoint(str(tmp_path / "damaged.gguf")))
        tokenizer.decode(tokenizer.encode("the and ß"))
    except JubakoError as error:
        message = str(error)
    else:
        message = ""
    assert str(tmp_path) not in message


# -- the cache --------------------------------------------------------------------------------


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    calls: list[Path] = []

    def counted(file: GGUFFile) -> dict[str, Any]:
        calls.append(file.path)
        return tokenizer_json(file)

    monkeypatch.setattr(gguf_tokenizer, "tokenizer_json", counted)
    return calls


def cached_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "tokenizers").iterdir())


def test_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    file = GGUFFile(vocabularies.sentencepiece_file(tmp_path))
    first = load_gguf_tokenizer(file).encode("the and").ids
    assert load_gguf_tokenizer(GGUFFile(file.path)).encode("the and").ids == first
    assert len(conversions) == len(cached_files(tmp_path)) == 1


def test_another_vocabulary_is_another_file(tmp_path: Path, conversions: list[Path]) -> None:
    for words in (["ab"], ["ba"]):
        load_gguf_tokenizer(GGUFFile(vocabularies.sentencepiece_file(tmp_path, words)))
    assert len(conversions) == len(cached_files(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_cache_is_made_again(
    tmp_path: Path, conversions: list[Path], damage: str
) -> None:
    path = vocabularies.sentencepiece_file(tmp_path)
    expected = load_gguf_tokenizer(GGUFFile(path)).encode("the and").ids
    (cached,) = cached_files(tmp_path)
    good = cached.read_bytes()
    bad = {
        "cut": good[:-5],
        "flip": good.replace(b"<turn>", b"<tern>"),
        "empty": b"",
        "foreign": b"{}",
    }[damage]
    cached.write_bytes(bad)
    assert load_gguf_tokenizer(GGUFFile(path)).encode("the and").ids == expected
    assert cached.read_bytes() == good
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JUBAKO_CACHE_DIR", str(tmp_path / "file"))
    path = vocabularies.sentencepiece_file(tmp_path)
    assert load_gguf_tokenizer(GGUFFile(path)).encode("the").tokens == ["<s>", "▁the"]
