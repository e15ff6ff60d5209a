"""Tokens go to the experts that a search one by one finds, with the weights it gives them."""

from __future__ import annotations

import math

import pytest
import torch

from jubako.layers.expert_routing import (
    Routing,
    biased_sigmoid_top_k_in_groups,
    softmax_top_k_in_groups,
)

E, T = 12, 50


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) * 2


def best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda i: -scores[i])[:count]


def searched(choice: list[float], k: int, groups: int, chosen: int, counted: int) -> list[int]:
    """The k best of `choice` within the `chosen` groups whose `counted` best sum highest."""
    size = len(choice) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    worth = {
        g: sum(sorted((choice[i] for i in members[g]), reverse=True)[:counted])
        for g in range(groups)
    }
    return best({i: choice[i] for g in best(worth, chosen) for i in members[g]}, k)


def check(routing: Routing, token: int, want: dict[int, float]) -> None:
    weights, ids = routing
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    got = dict(zip(ids[token].tolist(), weights[token].tolist()))
    assert got.keys() == want.keys()
    for expert, weight in want.items():
        assert math.isclose(got[expert], weight, rel_tol=1e-5)


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (4, 4), (6, 3), (3, 1)])
@pytest.mark.parametrize("k", [1, 3])
def test_softmax(k: int, groups: int, chosen: int) -> None:
    scores = logits()
    routing = softmax_top_k_in_groups(scores, k, groups=groups, chosen_groups=chosen, factor=2.5)
    for token, row in enumerate(scores.tolist()):
        total = sum(math.exp(x) for x in row)
        chance = [math.exp(x) / total for x in row]
        want = searched(chance, k, groups, chosen, counted=1)
        check(routing, token, {i: 2.5 * chance[i] for i in want})


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (4, 4), (6, 3), (12, 5)])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("offset", [-3.0, 0.0])
def test_biased_sigmoid(groups: int, chosen: int, normalise: bool, offset: float) -> None:
    """Also where all scores are below 0: those of groups out of reach are no 0."""
    scores, k = logits(1), 3
    bias = torch.linspace(-0.5, 0.5, E)[torch.randperm(E)] + offset
    routing = biased_sigmoid_top_k_in_groups(
        scores,
        k,
        bias=bias,
        groups=groups,
        chosen_groups=chosen,
        normalise=normalise,
        factor=1.5,
    )
    for token, row in enumerate(scores.tolist()):
        own = [1 / (1 + math.exp(-x)) for x in row]
        choice = [a + b for a, b in zip(own, bias.tolist())]
        ids = searched(choice, k, groups, chosen, counted=2)
        total = sum(own[i] for i in ids) if normalise else 1.0
        check(routing, token, {i: 1.5 * own[i] / total for i in ids})


def test_the_bias_decides_but_does_not_weigh() -> None:
    bias = torch.zeros(E)
    bias[7] = 100.0
    weights, ids = biased_sigmoid_top_k_in_groups(
        logits(), 1, bias=bias, groups=1, chosen_groups=1, normalise=False, factor=1.0
    )
    assert (ids == 7).all()
    assert torch.allclose(weights[:, 0], logits()[:, 7].sigmoid())


def test_sigmoids_that_underflow_give_no_nan() -> None:
    weights, _ = biased_sigmoid_top_k_in_groups(
        torch.full((2, E), -200.0),
        2,
        bias=torch.zeros(E),
        groups=1,
        chosen_groups=1,
        normalise=True,
        factor=1.0,
    )
    assert (weights == 0).all()


def test_arguments_stay_as_they_are() -> None:
    scores = logits()
    bias = torch.zeros(E)
    softmax_top_k_in_groups(scores, 2, groups=4, chosen_groups=2, factor=2.0)
    biased_sigmoid_top_k_in_groups(
        scores, 2, bias=bias, groups=4, chosen_groups=2, normalise=True, factor=2.0
    )
    assert torch.equal(scores, logits())
    assert not bias.any()
