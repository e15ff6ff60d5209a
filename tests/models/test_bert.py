"""Encoders: checkpoints of all ages load, and one that does not fit its config is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jubako import LLM
from jubako.errors import CheckpointError, UnsupportedModelError
from tests.exactness.test_pooling import change_config, make, prompts

ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


def embed(folder: Path, **options: Any) -> list[list[float]]:
    with LLM(str(folder), **ENGINE, **options) as llm:
        return [output.outputs.embedding for output in llm.embed(prompts()[:3])]


def rewrite(folder: Path, change: Any) -> None:
    """Change the checkpoint's tensors, a dict."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return make("bert", "Model", tmp_path)[0]


def test_old_spellings_are_the_same_model(bert):
    want = embed(bert)

    def age(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            old = old.replace("LayerNorm.bias", "LayerNorm.beta")
            weights["bert." + old] = weights.pop(name)
        weights["bert.embeddings.position_ids"] = torch.arange(130)[None]
        weights["cls.predictions.bias"] = torch.zeros(200)
        weights["cls.seq_relationship.weight"] = torch.zeros(2, 48)

    rewrite(bert, age)
    change_config(bert, architectures=["BertForMaskedLM"])
    assert embed(bert) == want


@pytest.mark.parametrize(
    ("name", "prefix"), [("roberta", "roberta."), ("distilbert", "distilbert.")]
)
def test_the_body_of_a_language_model_embeds(name, prefix, tmp_path):
    folder, model = make(name, "ForMaskedLM", tmp_path)
    assert any(key.startswith(prefix) for key in load_file(folder / "model.safetensors"))
    (first, *_) = embed(folder, normalize_embeddings=False)
    with torch.inference_mode():
        want = model.base_model(torch.tensor([prompts()[0]])).last_hidden_state[0, 0]
    assert (torch.tensor(first) - want).abs().max() < 2e-5


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(bert):
    name = "encoder.layer.1.attention.output.dense.weight"
    kept = load_file(bert / "model.safetensors")[name]
    rewrite(bert, lambda w: w.pop(name))
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.o_proj\.weight"):
        embed(bert)
    rewrite(bert, lambda w: w.update({name: kept[:-1]}))
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.1\.attention\.output\.dense"):
        embed(bert)
    rewrite(bert, lambda w: w.update({name: kept, "encoder.extra": kept.clone()}))
    with pytest.raises(UnsupportedModelError, match=r"encoder\.extra"):
        embed(bert)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "softsign"}, "softsign"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"architectures": ["NoBertModel"]}, "NoBertModel"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_built_is_named(bert, entries, match):
    change_config(bert, **entries)
    with pytest.raises(UnsupportedModelError, match=match):
        embed(bert)


def test_positions_past_the_table_of_roberta_are_refused(tmp_path):
    folder, _ = make("roberta", "Model", tmp_path)
    with LLM(str(folder), **ENGINE) as llm:
        # Two entries of the table are for padding.
        assert llm.llm_engine.ready.max_model_len == 128
        assert len(llm.embed([5] * 128)[0].outputs.embedding) == 48


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_bfloat16_is_no_worse_than_transformers(name, tmp_path):
    folder, model = make(name, "Model", tmp_path)
    rounded = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours, theirs = [], []
    with LLM(str(folder), **{**ENGINE, "dtype": "bfloat16"}, normalize_embeddings=False) as llm:
        for ids, output in zip(prompts(), llm.embed(prompts()), strict=True):
            with torch.inference_mode():
                want = model(torch.tensor([ids])).last_hidden_state[0, 0]
                other = rounded(torch.tensor([ids])).last_hidden_state[0, 0].float()
            ours.append((torch.tensor(output.outputs.embedding) - want).abs().mean())
            theirs.append((other - want).abs().mean())
    assert torch.stack(ours).mean() < 1.1 * torch.stack(theirs).mean()
