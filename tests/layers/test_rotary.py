"""Rotary frequencies equal transformers' for every scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jubako.errors import UnsupportedModelError
from jubako.layers.rotary import RopeParameters, RotaryEmbedding
from jubako.models.hf_config import rope_parameters

HEAD = 64
LENGTH = 4096

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, all entries": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 24,
        "beta_slow": 2,
        "attention_factor": 0.7,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1000,
        "truncate": False,
    },
    "yarn, original length left out": {"rope_type": "yarn", "factor": 4.0},
}


def reference(rope: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 50_000.0, **rope},
    )
    return LlamaRotaryEmbedding(config)


def ours(rope: dict[str, Any], max_model_len: int = LENGTH) -> RotaryEmbedding:
    config = {"rope_theta": 50_000.0, "rope_scaling": rope}
    return RotaryEmbedding(HEAD, rope_parameters(config, LENGTH), max_model_len)


@pytest.mark.parametrize("rope", SCALINGS.values(), ids=SCALINGS)
def test_angles(rope: dict[str, Any]) -> None:
    positions = torch.tensor([0, 1, 2, 77, 4095])
    want_cos, want_sin = reference(rope)(torch.zeros(1), positions[None])
    cos, sin = ours(rope)(positions)
    assert cos.dtype is torch.float32
    assert cos.shape == sin.shape == (5, 1, HEAD)
    signs = torch.cat((-torch.ones(HEAD // 2), torch.ones(HEAD // 2)))
    # An angle of some thousand radians has an error of its own of about 1e-4.
    torch.testing.assert_close(cos[:, 0], want_cos[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(sin[:, 0] * signs, want_sin[0], atol=1e-3, rtol=0)
    theirs = reference(rope)
    torch.testing.assert_close(ours(rope).frequencies, theirs.inv_freq, atol=0, rtol=2e-6)
    assert ours(rope).attention_factor == pytest.approx(theirs.attention_scaling)


def test_dynamic_scaling_is_fixed_by_the_longest_context() -> None:
    rope = SCALINGS["dynamic"]
    theirs = reference(rope)
    theirs(torch.zeros(1), torch.tensor([[3 * LENGTH - 1]]))
    want = theirs.inv_freq
    torch.testing.assert_close(ours(rope, 3 * LENGTH).frequencies, want, atol=0, rtol=2e-6)


def test_angles_are_float32_in_a_bfloat16_model() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = ours(SCALINGS["llama3"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rotary.frequencies, ours(SCALINGS["llama3"]).frequencies)
    positions = torch.tensor([4001])
    assert torch.equal(rotary(positions).cos, ours(SCALINGS["llama3"])(positions).cos)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope"}, "'longrope'"),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "llama3", "factor": 2.0}, "'low_freq_factor'"),
        ({"rope_type": "linear", "factor": "x"}, "'x'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_said(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ours(rope)


def test_theta_is_a_float() -> None:
    assert RotaryEmbedding(4, RopeParameters(theta=100), 8).frequencies.tolist() == pytest.approx(
        [1.0, 0.1]
    )
