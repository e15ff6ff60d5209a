"""What modules.json and the folders beside it say, in old and new spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jubako.checkpoint.architecture import take_apart
from jubako.checkpoint.sentence_transformers import read_modules
from jubako.errors import CheckpointError, UnsupportedModelError

OLD = "sentence_transformers.models."


def write(folder: Path, pooling: Any, *more: str, kind: str = OLD, **settings: Any) -> Path:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"x_{m}", m) for m in more)]
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": kind + name} for path, name in modules])
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_without_modules(tmp_path):
    assert read_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "CLS"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "MEAN"),
        ({"pooling_mode_lasttoken": True}, "LAST"),
        ({"pooling_mode": "mean"}, "MEAN"),
        ({"pooling_mode": "lasttoken"}, "LAST"),
    ],
    ids=str,
)
def test_the_pooling_is_read(tmp_path, pooling, wanted):
    modules = read_modules(write(tmp_path, pooling, max_seq_length=64))
    assert modules is not None
    assert (modules.pooling_type, modules.normalize) == (wanted, False)
    assert (modules.max_seq_length, modules.lower_case) == (64, False)


def test_the_normalisation_is_read(tmp_path):
    folder = write(tmp_path, {"pooling_mode": "cls"}, "Normalize", kind="a.b.", do_lower_case=True)
    modules = read_modules(folder)
    assert modules is not None
    assert modules.normalize
    assert modules.lower_case
    assert modules.max_seq_length is None


@pytest.mark.parametrize(
    ("pooling", "more", "match"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode_max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, (), " and "),
        ({}, (), "nothing"),
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        ({"pooling_mode": "mean"}, ("Dense",), "Dense"),
    ],
    ids=str,
)
def test_what_is_not_built_is_named(tmp_path, pooling, more, match):
    with pytest.raises(UnsupportedModelError, match=match):
        read_modules(write(tmp_path, pooling, *more))


@pytest.mark.parametrize(
    "content",
    ["{", "{}", "[1]", '[{"path": "a"}]', '[{"type": "x.Pooling", "path": "../y"}]',
     '[{"type": "x.Pooling", "path": "/y"}]', '[{"type": 5}]'],
)  # fmt: skip
def test_damage_is_said(tmp_path, content):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    ("name", "role", "causal"),
    [
        ("LlamaForCausalLM", "generate", "LlamaForCausalLM"),
        ("GPT2LMHeadModel", "generate", "GPT2LMHeadModel"),
        ("WhisperForConditionalGeneration", "generate", "WhisperForConditionalGeneration"),
        ("Gemma3TextModel", "embed", "Gemma3ForCausalLM"),
        ("Qwen3Model", "embed", "Qwen3ForCausalLM"),
        ("Gemma3TextForSequenceClassification", "classify", "Gemma3ForCausalLM"),
        ("LlamaForTokenClassification", "token_classify", "LlamaForCausalLM"),
        ("Qwen2ForProcessRewardModel", "process_reward", "Qwen2ForCausalLM"),
        ("Qwen2ForRewardModel", "reward", "Qwen2ForCausalLM"),
    ],
)
def test_a_name_tells_what_a_model_is_for(name, role, causal):
    parts = take_apart(name)
    assert (parts.role, parts.causal, parts.is_encoder) == (role, causal, False)


def test_encoders_are_known_by_their_stem():
    for stem in ("Bert", "Roberta", "XLMRoberta", "DistilBert"):
        for ending in ("Model", "ForMaskedLM", "ForSequenceClassification"):
            assert take_apart(stem + ending).is_encoder
