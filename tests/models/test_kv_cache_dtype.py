"""Models whose keys and values are kept in another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.layers.attention import Attention
from jubako.layers.cross_attention import CrossAttention
from jubako.layers.mla import MLAAttention
from jubako.models.load import build_model
from tests.models.harness import PagedRunner, hf_config_of, make_config
from tests.models.tiny import reference_model

TOKENS = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def runner_of(name: str, kind: str) -> PagedRunner:
    reference = reference_model(name)
    config = make_config(hf_config_of(reference)).replace(cache_config={"kv_cache_dtype": kind})
    model: Any = build_model(config, torch.device("cpu"))
    model.load_weights((n, tensor.clone()) for n, tensor in reference.state_dict().items())
    return PagedRunner(model)


@pytest.mark.parametrize("kind", ["int8", "fp8", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chunks_and_company_change_nothing(name: str, kind: str) -> None:
    want = runner_of(name, kind).step({0: TOKENS})[0]
    exact = runner_of(name, "auto").step({0: TOKENS})[0]
    assert (want - exact).norm() > 1e-4 * exact.norm(), "the option had no effect"
    runner = runner_of(name, kind)
    runner.step({1: TOKENS[:50]})
    got = []
    for begin, end in ((0, 7), (7, 8), (8, 41), (41, 60)):
        got.append(runner.step({0: TOKENS[begin:end], 1: TOKENS[begin : begin + 1]})[0])
    # A sum's last bit may turn the rounding of an element, never that of many.
    assert (torch.cat(got) - want).norm() < 0.2 * (want - exact).norm()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_page_is_half_as_large(kind: str) -> None:
    pages = []
    for chosen in ("auto", kind):
        config = JubakoConfig().replace(
            model_config={"dtype": "bfloat16"}, cache_config={"kv_cache_dtype": chosen}
        )
        layer = Attention(8, 128, 1.0, 4, config=config, layer_name="a")
        pages.append(layer.get_kv_cache_spec(32).page_size_bytes)
    assert pages[1] * 2 == pages[0] * (1 + 4 / 128)


def test_layers_that_keep_to_the_models_dtype_say_so() -> None:
    config = JubakoConfig().replace(
        model_config={"dtype": "bfloat16"}, cache_config={"kv_cache_dtype": "int8"}
    )
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8 .* latent attention"):
        MLAAttention(
            2,
            nope_size=8,
            rope_size=8,
            value_size=8,
            latent_size=16,
            scale=1.0,
            config=config,
            layer_name="a",
        )
    with pytest.raises(ConfigError, match="encoder's output"):
        CrossAttention(2, 8, 1.0, config=config, layer_name="a")
    with pytest.raises(ConfigError, match="sink tokens"):
        Attention(2, 8, 1.0, 2, config=config, layer_name="a", sink_len=16)
