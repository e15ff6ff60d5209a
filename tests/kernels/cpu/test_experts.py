"""Native mixtures of experts equal the reference, at every level, and choose as PyTorch does."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jubako.kernels.cpu.experts import (
    OP_ROUTE,
    PackedExperts,
    route_args,
    run_experts,
)
from jubako.kernels.cpu.library import Pool, Scratch
from jubako.kernels.cpu.recording import ExpertChoice, ExpertRules
from jubako.kernels.reference.moe import fused_experts
from jubako.layers.expert_routing import biased_sigmoid_top_k_in_groups, softmax_top_k_in_groups
from jubako.layers.moe import softmax_top_k, top_k_sigmoid, top_k_softmax

NUM_EXPERTS, K, HIDDEN, SIZE = 9, 3, 96, 160
"""The last panel of a matrix is not full, and no expert's rows fill a tile."""

RULES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh, weighed before": {"activation": "gelu_tanh", "weigh_input": True},
    "clamped, biased": {
        "activation": "clamped_swiglu",
        "limit": 0.7,
        "alpha": 1.3,
        "up_bias": torch.linspace(-1, 1, NUM_EXPERTS * 2 * SIZE).view(NUM_EXPERTS, -1),
        "down_bias": torch.linspace(1, -1, NUM_EXPERTS * HIDDEN).view(NUM_EXPERTS, -1),
    },
}


def matrices(dtype: torch.dtype, size: int = 2 * SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    up = torch.randn(NUM_EXPERTS, size, HIDDEN) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, SIZE) / SIZE**0.5
    return up.to(dtype), down.to(dtype)


def rows(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs with a stride of their own, weights, and experts of which some are asked by none."""
    x = torch.randn(count, HIDDEN + 32).to(dtype)[:, :HIDDEN]
    logits = torch.randn(count, NUM_EXPERTS)
    logits[:, 4] = -100
    return x, *softmax_top_k(logits, K, renormalize=True)


def exact(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    rules: ExpertRules,
) -> torch.Tensor:
    """The reference in float64."""
    return fused_experts(
        x.double(),
        up.double(),
        down.double(),
        weights,
        ids,
        act=rules.activation,
        gate_up_bias=None if rules.up_bias is None else rules.up_bias.double(),
        down_bias=None if rules.down_bias is None else rules.down_bias.double(),
        limit=rules.limit,
        alpha=rules.alpha,
        weigh_input=rules.weigh_input,
    )


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("dtype", "kind", "tolerance"),
    [
        (torch.float32, None, 2e-6),
        (torch.bfloat16, None, 0.015),
        (torch.float32, "INT8", 0.03),
        (torch.bfloat16, "INT8", 0.1),
        (torch.bfloat16, "Q8_0", 0.05),
        (torch.bfloat16, "Q4_0", 0.6),
    ],
    ids=str,
)
def test_equal_the_reference(
    native_pool: Pool, dtype: torch.dtype, kind: str | None, tolerance: float, rules: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    up, down = matrices(dtype)
    own = ExpertRules(**rules)
    packed = PackedExperts.from_tensors(
        up.clone(), down.clone(), native_pool, gated=True, kind=kind
    )
    scratch = Scratch()
    for count in (0, 1, 2, 40, 700):
        x, weights, ids = rows(count, dtype)
        got = run_experts(native_pool, scratch, packed, own, x, weights, ids)
        assert got.dtype == dtype
        difference = (got.double() - exact(x, up, down, weights, ids, own)).abs()
        assert got.shape == x.shape
        assert (difference < tolerance).all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_experts_without_a_gate(native_pool: Pool, activation: str) -> None:
    torch.manual_seed(0)
    up, down = matrices(torch.float32, SIZE)
    packed = PackedExperts.from_tensors(
        up.clone(), down.clone(), native_pool, gated=False, kind=None
    )
    x, weights, ids = rows(50, torch.float32)
    got = run_experts(
        native_pool, Scratch(), packed, ExpertRules(activation=activation), x, weights, ids
    )
    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu2": lambda x: x.relu() ** 2,
    }[activation]
    every = torch.einsum(
        "ehs,tes->teh", down.double(), act(torch.einsum("esh,th->tes", up.double(), x.double()))
    )
    want = (every.take_along_dim(ids[..., None], 1) * weights[..., None]).sum(1)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


def test_in_float32_a_row_is_the_same_in_every_company(native_pool: Pool) -> None:
    torch.manual_seed(0)
    up, down = matrices(torch.float32)
    packed = PackedExperts.from_tensors(up, down, native_pool, gated=True, kind=None)
    x, weights, ids = rows(600, torch.float32)
    run = [native_pool, Scratch(), packed, ExpertRules()]
    every = run_experts(*run, x, weights, ids)
    for part in (slice(0, 1), slice(3, 20), slice(100, 598), slice(599, 600)):
        assert torch.equal(run_experts(*run, x[part], weights[part], ids[part]), every[part])


BIAS = torch.linspace(-0.3, 0.4, 16).roll(5)

ROUTES: dict[str, tuple[ExpertChoice, Any]] = {
    "softmax": (ExpertChoice(3, "softmax"), lambda x: softmax_top_k(x, 3, renormalize=False)),
    "softmax, sum 1": (
        ExpertChoice(3, "softmax", normalise=True),
        lambda x: softmax_top_k(x, 3, renormalize=True),
    ),
    "softmax of chosen": (ExpertChoice(4, "softmax of chosen"), lambda x: top_k_softmax(x, 4)),
    "sigmoid of chosen": (ExpertChoice(2, "sigmoid of chosen"), lambda x: top_k_sigmoid(x, 2)),
    "groups": (
        ExpertChoice(3, "softmax", factor=2.5, groups=4, chosen_groups=2),
        lambda x: softmax_top_k_in_groups(x, 3, groups=4, chosen_groups=2, factor=2.5),
    ),
    "groups by two, biased": (
        ExpertChoice(5, "sigmoid", True, 1.5, BIAS, groups=4, chosen_groups=2, group_best=2),
        lambda x: biased_sigmoid_top_k_in_groups(
            x, 5, bias=BIAS, groups=4, chosen_groups=2, normalise=True, factor=1.5
        ),
    ),
}


def route(
    pool: Pool, logits: torch.Tensor, routing: ExpertChoice
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.full((len(logits), routing.k), torch.nan)
    ids = torch.full((len(logits), routing.k), -1, dtype=torch.int32)
    args = route_args(logits.shape[1], routing)
    count = ctypes.c_int64(len(logits))
    args.rows = ctypes.addressof(count)
    args.logits, args.ld_logits = logits.data_ptr(), logits.stride(0)
    args.weights, args.ids = weights.data_ptr(), ids.data_ptr()
    pool.run(OP_ROUTE, args)
    return weights, ids


@pytest.mark.parametrize(("routing", "by_torch"), ROUTES.values(), ids=ROUTES)
def test_routes_as_pytorch_does(native_pool: Pool, routing: ExpertChoice, by_torch: Any) -> None:
    torch.manual_seed(0)
    logits = torch.randn(70, 16) * 3
    weights, ids = route(native_pool, logits, routing)
    want, want_ids = by_torch(logits)
    order, want_order = ids.long().sort(), want_ids.sort()
    assert torch.equal(order.values, want_order.values)
    got = weights.gather(1, order.indices)
    torch.testing.assert_close(got, want.gather(1, want_order.indices), rtol=2e-6, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen_and_no_number_is_no_fault(native_pool: Pool) -> None:
    for value in (1.0, float("nan"), -float("inf")):
        _, ids = route(
            native_pool, torch.full((2, 16), value), ExpertChoice(3, "softmax of chosen")
        )
        assert all(0 <= e < 16 for e in ids.flatten().tolist())
        if value == 1.0:
            assert ids.tolist() == [[0, 1, 2]] * 2
        assert all(len(set(row)) == 3 for row in ids.tolist())
