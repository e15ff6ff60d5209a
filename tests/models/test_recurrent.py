"""Models with recurrent layers, beyond what is tested of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from jubako.config.recurrent import WRITES_BORDERS
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.layers.recurrent import RecurrentLayer
from jubako.models.load import build_model, cache_layers
from jubako.models.registry import supported_architectures

from .families.mamba2 import SIZES
from .harness import PagedRunner, from_transformers, hf_config_of, make_config
from .tiny import CONFIGS, reference_model

NAMES = [name for name, (model, _) in CONFIGS.items() if model.__name__ in WRITES_BORDERS]


def test_the_list_of_recurrent_models_is_right() -> None:
    """The options are completed from it before any model is built."""
    assert set(WRITES_BORDERS) <= set(supported_architectures())
    tested = set()
    for name, (model_class, make) in CONFIGS.items():
        config = make()
        hf_config = {**config.to_dict(), "architectures": [model_class.__name__]}
        if model_class.__name__ not in supported_architectures():
            continue
        model = build_model(make_config(hf_config), torch.device("meta"))
        layers = [x for x in cache_layers(model).values() if isinstance(x, RecurrentLayer)]
        assert bool(layers) == (model_class.__name__ in WRITES_BORDERS), name
        if layers:
            borders = all(layer.writes_borders for layer in layers)
            assert borders == WRITES_BORDERS[model_class.__name__], name
            tested.add(model_class.__name__)
    assert tested == set(WRITES_BORDERS)


def test_the_length_of_a_step_may_be_limited() -> None:
    torch.manual_seed(0)
    config = Mamba2Config(**SIZES, time_step_limit=(0.3, 0.9))
    reference = Mamba2ForCausalLM(config).eval()
    model = from_transformers(reference)
    tokens = torch.randint(3, 128, (60,))
    with torch.no_grad():
        want = reference(tokens[None]).logits[0]
        reference_free = Mamba2ForCausalLM(Mamba2Config(**SIZES)).eval()
        reference_free.load_state_dict(reference.state_dict())
        assert (reference_free(tokens[None]).logits[0] - want).abs().max() > 0.01
    runner = PagedRunner(model)
    got = torch.cat(
        [runner.step({0: part})[0] for part in (tokens[:41].tolist(), tokens[41:].tolist())]
    )
    assert (got - want).abs().max() < 1e-4


def test_infinity_as_transformers_writes_it() -> None:
    reference = reference_model("mamba2")
    hf_config = hf_config_of(reference)
    hf_config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    build_model(make_config(hf_config), torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_a_new_request_reads_no_old_state(name: str) -> None:
    """Its block still holds another's."""
    model = from_transformers(reference_model(name))
    runner = PagedRunner(model, num_blocks=40)
    first = runner.step({0: list(range(3, 60))})[0]
    blocks = runner.tables[0]
    runner.tables[1] = blocks[::-1]
    runner.lengths[1] = 0
    again = runner.step({1: list(range(3, 60))})[1]
    torch.testing.assert_close(again, first, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba2", {"n_groups": 3}, "8 Mamba heads cannot be divided into 3 groups"),
        ("mamba2", {"head_dim": 8}, "head_dim=8 are not the 128 elements"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("granite 4", {"layer_types": ["mamba", "moe", "mamba", "mamba"]}, "layer_types"),
        ("granite 4", {"layer_types": ["mamba"]}, "names 1 layer_types for 4"),
        ("granite 4", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ("nemotron-h", {"sliding_window": 5}, "sliding_window"),
        ("nemotron-h", {"layers_block_type": ["mamba", "rnn"]}, "'rnn'"),
        ("nemotron-h, experts, biased", {"moe_latent_size": 32}, "moe_latent_size"),
    ],
)
def test_what_is_not_supported_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    hf_config = {**hf_config_of(reference_model(name)), **changes}
    with pytest.raises(UnsupportedModelError, match=message):
        build_model(make_config(hf_config), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba2", {"time_step_limit": [0.0]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [0.0, "x"]}, "time_step_limit"),
        ("bamba", {"attn_layer_indices": [9]}, "attn_layer_indices"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("nemotron-h", {"layers_block_type": None}, "hybrid_override_pattern"),
        (
            "nemotron-h",
            {"layers_block_type": None, "hybrid_override_pattern": "M?"},
            "hybrid_override_pattern",
        ),
    ],
)
def test_a_broken_configuration_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    hf_config = {**hf_config_of(reference_model(name)), **changes}
    with pytest.raises(CheckpointError, match=message):
        build_model(make_config(hf_config), torch.device("cpu"))


def test_a_pattern_of_letters_is_a_list_of_layers() -> None:
    reference = reference_model("nemotron-h")
    hf_config = hf_config_of(reference)
    del hf_config["layers_block_type"]
    hf_config["hybrid_override_pattern"] = "M-*-M"
    model: Any = build_model(make_config(hf_config), torch.device("cpu"))
    weights = {n.replace("model.", "backbone.", 1): t for n, t in reference.state_dict().items()}
    model.load_weights(weights.items())
    tokens = list(range(3, 30))
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0]
    assert (PagedRunner(model).step({0: tokens})[0] - want).abs().max() < 1e-4
