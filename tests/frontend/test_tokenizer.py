"""The tokeniser's interface, and tokenisers from Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from jubako.checkpoint.info import Checkpoint
from jubako.errors import CheckpointError, ModelNotFoundError, ValidationError
from jubako.frontend.token_bytes import TokenBytes
from jubako.frontend.tokenizer import Tokenizer, load_tokenizer

from . import vocabularies

SENTENCEPIECE = vocabularies.sentencepiece()
BYTE_LEVEL = vocabularies.byte_level()
WORD_LEVEL = vocabularies.word_level()


# -- the interface ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, BYTE_LEVEL], ids=["pieces", "bytes"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    # SentencePiece spells a space with ▁ and reads that back as a space.
    expected = text.replace("▁", " ") if tokenizer is SENTENCEPIECE else text
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, BYTE_LEVEL], ids=["pieces", "bytes"])
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decoding_is_that_of_the_library(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.max_token_id), max_size=20))
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    ours = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" in expected and tokenizer is SENTENCEPIECE:
        # The library gives up a whole run of byte tokens for one bad byte; only that part is
        # replaced here.
        assert "\ufffd" in ours
    else:
        assert ours == expected


def test_batch_is_each() -> None:
    texts = ["the and", "", "日本語 in", "x" * 50, "and the " * 2000]
    for add in (True, False):
        assert SENTENCEPIECE.encode_batch(texts, add) == [
            SENTENCEPIECE.encode(text, add) for text in texts
        ]
        assert SENTENCEPIECE.encode(texts[-1], add) == (
            SENTENCEPIECE.backend.encode(texts[-1], add_special_tokens=add).ids
        )


def test_special_tokens() -> None:
    assert SENTENCEPIECE.bos_token_id == SENTENCEPIECE.backend.token_to_id("<s>")
    assert SENTENCEPIECE.eos_token_id == SENTENCEPIECE.backend.token_to_id("</s>")
    assert SENTENCEPIECE.encode("ab")[0] == SENTENCEPIECE.bos_token_id
    assert SENTENCEPIECE.bos_token_id not in SENTENCEPIECE.encode("ab", False)
    assert BYTE_LEVEL.bos_token_id is None
    turn = SENTENCEPIECE.encode("<turn>", False)[-1]
    assert SENTENCEPIECE.is_special(turn)
    assert SENTENCEPIECE.decode([turn]) == ""
    assert SENTENCEPIECE.decode([turn], skip_special_tokens=False) == "<turn>"


def test_unknown_ids() -> None:
    for tokenizer in (SENTENCEPIECE, BYTE_LEVEL):
        beyond = tokenizer.max_token_id + 1
        assert tokenizer.id_to_token(tokenizer.max_token_id) is not None
        assert tokenizer.id_to_token(beyond) is None
        assert tokenizer.id_to_token(-1) is None
        assert tokenizer.decode([beyond, -1, 2**70]) == ""
        assert tokenizer.token_bytes is not None
        assert beyond not in tokenizer.token_bytes.table
    with pytest.raises(ValidationError, match="at least 0"):
        WORD_LEVEL.decode([-1])


def test_highest_id_where_ids_have_gaps() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert Tokenizer(backend).max_token_id == 7


def test_bytes_of_a_token_keep_its_space() -> None:
    the = SENTENCEPIECE.encode("the", False)[0]
    assert SENTENCEPIECE.bytes_of(the) == b" the"
    assert SENTENCEPIECE.decode([the]) == "the"
    assert SENTENCEPIECE.bytes_of(SENTENCEPIECE.backend.token_to_id("<0xE2>")) == b"\xe2"
    assert BYTE_LEVEL.bytes_of(BYTE_LEVEL.backend.token_to_id("Ġ")) == b" "
    assert WORD_LEVEL.bytes_of(2) == b"one"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_half_surrogates(text: str) -> None:
    with pytest.raises(ValidationError, match="surrogate pair at character"):
        SENTENCEPIECE.encode(text)
    with pytest.raises(ValidationError, match="surrogate pair"):
        SENTENCEPIECE.encode_batch(["fine", text])


def test_texts_must_be_strings() -> None:
    for bad in (None, 3, b"bytes", ["a"]):
        with pytest.raises(ValidationError, match="must be a string, not"):
            SENTENCEPIECE.encode(bad)  # type: ignore[arg-type]


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    backend = vocabularies.trained_byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(backend).encode("The quick brown fox")) > 2


def test_which_decoders_have_a_table_of_bytes() -> None:
    def table(decoder: Any) -> TokenBytes | None:
        backend = Backend(models.BPE({"a": 0, "▁b": 1}, []))
        if decoder is not None:
            backend.decoder = decoder
        return TokenBytes.of(backend)

    replace = decoders.Replace("▁", " ")
    steps = [replace, decoders.ByteFallback(), decoders.Fuse()]
    assert table(None) is None
    assert table(decoders.WordPiece()) is None
    assert table(decoders.Sequence([decoders.Replace("_", " "), *steps[1:]])) is None
    assert table(decoders.Sequence([*steps, decoders.Strip(" ", 2, 0)])) is None
    for decoder, strips in (
        (decoders.ByteLevel(), False),
        (decoders.Sequence([decoders.ByteLevel()]), False),
        (decoders.Sequence(steps), False),
        (decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]), True),
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
    ):
        found = table(decoder)
        assert found is not None
        assert found.strips_space is strips


# -- Hugging Face folders ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    backend = vocabularies.trained_byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(path / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    config = {"eos_token": eos, "bos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def checkpoint(folder: Path, **fields: Any) -> Checkpoint:
    return Checkpoint(kind="hf", path=folder, name="m", **{"hf_config": {}, **fields})


def test_folder_is_read_as_transformers_reads_it(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load_tokenizer(checkpoint(folder))
    for text in vocabularies.CORPUS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_named_tokens_of_the_map_and_of_the_model(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(checkpoint(folder)).eos_token_id is None
    assert load_tokenizer(checkpoint(folder, eos_token_ids=(1, 0))).eos_token_id == 1
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(checkpoint(folder, eos_token_ids=(1,))).eos_token_id == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda f: (f / "chat_template.jinja").write_text("T"),
        lambda f: (f / "chat_template.json").write_text('{"chat_template": "T"}'),
        lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": "T"}'),
        lambda f: (f / "tokenizer_config.json").write_text(
            '{"chat_template": [{"name": "tools", "template": "X"},'
            ' {"name": "default", "template": "T"}]}'
        ),
    ],
)
def test_places_of_the_chat_template(folder: Path, write: Callable[[Path], None]) -> None:
    assert load_tokenizer(checkpoint(folder)).chat_template is None
    write(folder)
    assert load_tokenizer(checkpoint(folder)).chat_template == "T"


def test_gemma_without_a_template_gets_its_turns(folder: Path) -> None:
    gemma = load_tokenizer(checkpoint(folder, hf_config={"model_type": "gemma3_text"}))
    assert gemma.chat_template is not None
    assert "<start_of_turn>" in gemma.chat_template


def test_another_tokeniser(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUBAKO_CACHE_DIR", str(tmp_path / "cache"))
    gguf = vocabularies.sentencepiece_file(tmp_path)
    model = checkpoint(folder)
    assert load_tokenizer(model, str(gguf)).bos_token_id == SENTENCEPIECE.bos_token_id
    assert load_tokenizer(model, str(folder)).bos_token_id == 0
    # The file alone, too; what stands beside it belongs to it.
    assert load_tokenizer(model, str(folder / "tokenizer.json")).bos_token_id == 0
    with pytest.raises(ModelNotFoundError, match="no tokeniser at"):
        load_tokenizer(model, str(tmp_path / "none"))


def test_missing_tokeniser(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"Folder 'model' has no tokenizer\.json") as error:
        load_tokenizer(checkpoint(folder))
    assert str(folder) not in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{name} (cannot be read|is not valid JSON)"):
        load_tokenizer(checkpoint(folder))


def test_no_torch_is_loaded() -> None:
    import subprocess
    import sys

    code = (
        "import sys, jubako.frontend.tokenizer, jubako.frontend.detokenizer, jubako.frontend.chat;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
