"""Experts: who is asked, what they answer, and how a checkpoint's tensors reach them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.layers.moe import (
    CLAMPED_SWIGLU,
    Experts,
    softmax_top_k,
    top_k_sigmoid,
    top_k_softmax,
)
from jubako.models.weights import load_weights

E, HIDDEN, SIZE = 5, 12, 7


def experts(activation: str = "silu", seed: int = 0, **options: Any) -> Experts:
    made = Experts(E, HIDDEN, SIZE, activation, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return made


def by_definition(
    made: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Token by token, in float64."""
    rows = []
    for token, own_weights, own_ids in zip(x.double(), weights.double(), ids.tolist()):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, e in zip(own_weights, own_ids):
            hidden = made.gate_up[e].double() @ (token * weight if made.weigh_input else token)
            if made.gate_up_bias is not None:
                hidden = hidden + made.gate_up_bias[e].double()
            gate, up = hidden.chunk(2)
            match made.activation:
                case "silu":
                    active = F.silu(gate) * up
                case "gelu":
                    active = F.gelu(gate) * up
                case "gelu_tanh":
                    active = F.gelu(gate, approximate="tanh") * up
                case _:
                    gate = gate.clamp(max=made.limit)
                    up = up.clamp(-made.limit, made.limit)
                    active = gate * torch.sigmoid(gate * made.alpha) * (up + 1)
            answer = made.down[e].double() @ active
            if made.down_bias is not None:
                answer = answer + made.down_bias[e].double()
            total += answer if made.weigh_input else weight * answer
        rows.append(total)
    return torch.stack(rows)


def routed(tokens: int, k: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    return x, *softmax_top_k(torch.randn(tokens, E, generator=generator), k, renormalize=False)


@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("silu", {}),
        ("gelu", {"bias": True}),
        ("gelu_pytorch_tanh", {"weigh_input": True}),
        (CLAMPED_SWIGLU, {"bias": True, "limit": 0.5, "alpha": 1.3}),
    ],
)
def test_equals_the_definition(
    k: int, tokens: int, activation: str, options: dict[str, Any]
) -> None:
    made = experts(activation, **options)
    x, weights, ids = routed(tokens, k)
    before = x.clone()
    got = made(x, weights, ids)
    assert got.dtype == torch.float32
    assert (got - by_definition(made, x, weights, ids)).abs().max() < 1e-4
    assert torch.equal(x, before)


def test_other_tokens_do_not_change_an_answer() -> None:
    made = experts()
    x, weights, ids = routed(40, 3)
    together = made(x, weights, ids)
    for token in (0, 17, 39):
        part = slice(token, token + 1)
        alone = made(x[part], weights[part], ids[part])
        assert torch.allclose(alone, together[part], atol=1e-6)


def test_no_tokens() -> None:
    x, weights, ids = routed(3, 2)
    assert experts()(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)


def test_routers() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    p = logits.softmax(-1)[0]
    weights, ids = softmax_top_k(logits, 2, renormalize=False)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, p[[1, 2]][None])
    weights, _ = softmax_top_k(logits, 2, renormalize=True)
    assert torch.allclose(weights, (p[[1, 2]] / p[[1, 2]].sum())[None])
    weights, ids = top_k_softmax(logits, 2)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, torch.tensor([[3.0, 2.0]]).softmax(-1))
    weights, ids = top_k_sigmoid(logits, 1)
    assert ids.tolist() == [[1]]
    assert torch.allclose(weights, torch.tensor([[3.0]]).sigmoid())


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'relu9'"):
        Experts(2, 4, 4, "relu9")


class Holder(nn.Module):
    def __init__(self, made: Experts) -> None:
        super().__init__()
        self.experts = made


def load(made: Experts, weights: dict[str, torch.Tensor]) -> set[str]:
    return load_weights(Holder(made), weights.items(), lambda name: name)


def one_by_one(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}
    return {
        f"experts.{e}.{part}.weight": torch.randn(shape, generator=generator)
        for e in range(E)
        for part, shape in shapes.items()
    }


def fused(single: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def matrices(part: str) -> torch.Tensor:
        return torch.stack([single[f"experts.{e}.{part}.weight"] for e in range(E)])

    gate_up = torch.cat((matrices("gate_proj"), matrices("up_proj")), dim=1)
    return {"experts.gate_up_proj": gate_up, "experts.down_proj": matrices("down_proj")}


def test_one_tensor_an_expert_or_one_for_all() -> None:
    single = one_by_one()
    want = fused(single)
    for weights in (single, want, dict(reversed(single.items()))):
        made = experts()
        assert load(made, weights) == weights.keys()
        assert torch.equal(made.gate_up, want["experts.gate_up_proj"])
        assert torch.equal(made.down, want["experts.down_proj"])


def test_transposed_and_interleaved() -> None:
    want = fused(one_by_one())
    gate_up, down = want["experts.gate_up_proj"], want["experts.down_proj"]
    weights = {"experts.gate_up_proj": gate_up.mT, "experts.down_proj": down.mT}
    made = experts(transposed=True)
    load(made, weights)
    assert torch.equal(made.gate_up, gate_up)
    assert torch.equal(made.down, down)

    turns = torch.stack((gate_up[:, :SIZE], gate_up[:, SIZE:]), dim=2).flatten(1, 2)
    bias = torch.randn(E, 2 * SIZE)
    weights |= {
        "experts.gate_up_proj": turns.mT,
        "experts.gate_up_proj_bias": bias,
        "experts.down_proj_bias": torch.randn(E, HIDDEN),
    }
    made = experts(transposed=True, interleaved=True, bias=True)
    load(made, weights)
    assert torch.equal(made.gate_up, gate_up)
    assert made.gate_up_bias is not None
    assert torch.equal(made.gate_up_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1))


def test_a_missing_expert_is_named() -> None:
    weights = one_by_one()
    del weights["experts.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks.*experts\.3\.up_proj\.weight"):
        load(experts(), weights)
    weights = fused(one_by_one())
    del weights["experts.down_proj"]
    with pytest.raises(CheckpointError, match=r"lacks.*experts\.0\.down_proj\.weight.*and 4 more"):
        load(experts(), weights)


def test_both_forms_at_once_are_too_many() -> None:
    single = one_by_one()
    with pytest.raises(CheckpointError, match="twice"):
        load(experts(), single | fused(single))
    with pytest.raises(CheckpointError, match="twice"):
        load(experts(), fused(single) | single)


def test_a_misshapen_expert_is_named() -> None:
    weights = one_by_one()
    weights["experts.2.down_proj.weight"] = torch.zeros(SIZE, HIDDEN)
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.down_proj\.weight.*\[7, 12\].*\[12, 7\]"
    ):
        load(experts(), weights)
