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
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
        "long_factor": [1.0 + 0.7 * i for i in range(HEAD // 2)],
    },
    "longrope, all entries": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4000,
        "short_factor": [1.0] * (HEAD // 2),
        "long_factor": [2] * (HEAD // 2),
        "factor": 32.0,
        "attention_factor": 1.3,
    },
    "three quarters of a head, yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "partial_rotary_factor": 0.75,
    },
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
    turned = int(HEAD * rope.get("partial_rotary_factor", 1.0))
    assert cos.shape == sin.shape == (5, 1, turned)
    signs = torch.cat((-torch.ones(turned // 2), torch.ones(turned // 2)))
    # An angle of some thousand radians has an error of its own of about 1e-4.
    torch.testing.assert_close(cos[:, 0], want_cos[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(sin[:, 0] * signs, want_sin[0], atol=1e-3, rtol=0)
    theirs = reference(rope)
    theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(ours(rope).frequencies, theirs.inv_freq, atol=0, rtol=2e-6)
    assert ours(rope).attention_factor == pytest.approx(theirs.attention_scaling)


def test_dynamic_scaling_is_fixed_by_the_longest_context() -> None:
    rope = SCALINGS["dynamic"]
    theirs = reference(rope)
    theirs(torch.zeros(1), torch.tensor([[3 * LENGTH - 1]]))
    want = theirs.inv_freq
    torch.testing.assert_close(ours(rope, 3 * LENGTH).frequencies, want, atol=0, rtol=2e-6)


def test_a_part_of_a_head_turns() -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    half = RotaryEmbedding(HEAD // 2, RopeParameters(50_000.0), LENGTH)
    assert torch.equal(ours(rope).frequencies, half.frequencies)


@pytest.mark.parametrize(
    ("max_model_len", "which"),
    [(1023, "short_factor"), (1024, "short_factor"), (1025, "long_factor")],
)
def test_the_longest_context_chooses_the_factors(max_model_len: int, which: str) -> None:
    """transformers chooses by the sequence at hand; a sequence as long as allowed agrees."""
    rope = SCALINGS["longrope"]
    theirs = reference(rope)
    theirs(torch.zeros(1), torch.tensor([[max_model_len - 1]]))
    got = ours(rope, max_model_len).frequencies
    torch.testing.assert_close(got, theirs.inv_freq, atol=0, rtol=2e-6)
    plain = ours({"rope_type": "default"}).frequencies
    torch.testing.assert_close(got, plain / torch.tensor(rope[which]))


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
        ({"rope_type": "proportional"}, "'proportional'"),
        ({"rope_type": "longrope"}, "32 numbers above 0 for 'short_factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 31}, "32 numbers above 0"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 31 + [0]}, "32 numbers above 0"),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "llama3", "factor": 2.0}, "'low_freq_factor'"),
        ({"rope_type": "linear", "factor": "x"}, "'x'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": "x"}, "'x'"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "at most 1, got 1.5"),
        ({"rope_type": "default", "partial_rotary_factor": "x"}, "got 'x'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.01}, "turns 0 elements"),
        ({"rope_type": "default", "partial_rotary_factor": 0.05}, "turns 3 elements"),
    ],
)
def test_what_is_not_supported_is_said(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ours(rope)


def test_theta_is_a_float() -> None:
    assert RotaryEmbedding(4, RopeParameters(theta=100), 8).frequencies.tolist() == pytest.approx(
        [1.0, 0.1]
    )
