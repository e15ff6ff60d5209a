"""Of a multimodal Mistral 3 the text part runs, whichever family it is of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from jubako.errors import UnsupportedModelError
from jubako.models import ministral3

from .harness import PagedRunner, from_transformers
from .sizes import SIZES, YARN, rope

VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
TEXTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 10},
    "ministral3": {
        "rope_parameters": rope(
            1e6, **{**YARN, "original_max_position_embeddings": 8}, llama_4_scaling_beta=0.3
        )
    },
}


@pytest.mark.parametrize("kind", TEXTS)
def test_logits(kind: str) -> None:
    torch.manual_seed(0)
    text = {**SIZES, "model_type": kind, "head_dim": 16, **TEXTS[kind]}
    config = Mistral3Config(text_config=text, vision_config=VISION)
    reference = Mistral3ForConditionalGeneration(config).eval()
    model = from_transformers(reference)
    tokens = torch.randint(11, 128, (1, 40))
    with torch.no_grad():
        want = reference(tokens).logits[0]
    got = PagedRunner(model).step({0: tokens[0].tolist()})[0]
    assert (got - want).abs().max() < 1e-4


def test_another_text_part_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        ministral3.ModelArgs.from_config({"text_config": {"model_type": "llama"}})
