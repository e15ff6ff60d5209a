"""A mask is recognised by what it lets through, and tokens may meet in attention alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from jubako.errors import UnsupportedModelError
from jubako.models.traced_attention import Trace, collecting, require_attention_alone

LENGTH = 100


class Layer(nn.Module):
    pass


def heads(count: int = 4, size: int = 8, tokens: int = 3) -> torch.Tensor:
    return torch.empty(1, count, tokens, size, device="meta")


def window_of(rule: Any) -> int | None:
    trace = Trace(LENGTH)
    layer = Layer()
    trace.attend(layer, heads(), heads(2), heads(2), trace.mask(rule), {})
    return trace.calls[id(layer)].sliding_window


class TestMasks:
    def test_causal(self) -> None:
        assert window_of(lambda b, h, q, k: k <= q) is None
        assert window_of(None) is None

    @pytest.mark.parametrize("window", [1, 2, 31, 99])
    def test_windows(self, window: int) -> None:
        assert window_of(lambda b, h, q, k: (k <= q) & (k > q - window)) == window

    @pytest.mark.parametrize("window", [100, 4096])
    def test_a_window_as_long_as_the_context_is_none(self, window: int) -> None:
        assert window_of(lambda b, h, q, k: (k <= q) & (k > q - window)) is None

    @pytest.mark.parametrize(
        "rule",
        [
            lambda b, h, q, k: k >= 0,
            lambda b, h, q, k: (k <= q) & (k // 16 == q // 16),
            lambda b, h, q, k: (k <= q) | (k < 5),
            lambda b, h, q, k: k < q,
            lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 2)),
        ],
        ids=["all", "chunks", "prefix", "not itself", "window and first"],
    )
    def test_others_are_refused(self, rule: Any) -> None:
        with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
            window_of(rule)

    def test_a_mask_of_somebody_else_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="of its own"):
            Trace(LENGTH).attend(Layer(), heads(), heads(), heads(), torch.zeros(1), {})

    def test_a_window_that_the_mask_has_not(self) -> None:
        trace = Trace(LENGTH)
        with pytest.raises(UnsupportedModelError, match="window of 7"):
            trace.attend(
                Layer(), heads(), heads(), heads(), trace.mask(None), {"sliding_window": 7}
            )


class TestArguments:
    def test_an_unknown_one_is_named(self) -> None:
        with pytest.raises(UnsupportedModelError, match="position_bias"):
            Trace(LENGTH).attend(
                Layer(), heads(), heads(), heads(), None, {"position_bias": torch.zeros(1)}
            )

    def test_a_scale_that_is_learned(self) -> None:
        with pytest.raises(UnsupportedModelError, match="scaling"):
            Trace(LENGTH).attend(
                Layer(), heads(), heads(), heads(), None, {"scaling": torch.ones(1)}
            )

    def test_sinks_of_the_module_are_found(self) -> None:
        layer = Layer()
        layer.extra = nn.Parameter(torch.zeros(4))
        trace = Trace(LENGTH)
        trace.attend(layer, heads(), heads(), heads(), None, {"s_aux": layer.extra})
        assert trace.calls[id(layer)].sinks == "extra"
        with pytest.raises(UnsupportedModelError, match="sinks"):
            Trace(LENGTH).attend(layer, heads(), heads(), heads(), None, {"s_aux": torch.zeros(4)})

    def test_keys_of_other_tokens(self) -> None:
        with pytest.raises(UnsupportedModelError, match="not self-attention"):
            Trace(LENGTH).attend(Layer(), heads(), heads(tokens=5), heads(tokens=5), None, {})


class TestTokensMeetInAttentionAlone:
    """Functions of ids and positions that stand for models."""

    @staticmethod
    def run(forward: Any) -> None:
        require_attention_alone(forward, 50, LENGTH, torch.device("cpu"))

    def test_each_for_itself(self) -> None:
        self.run(lambda ids, positions: torch.stack((ids.sin(), positions.cos()), 1))

    @pytest.mark.parametrize(
        "forward",
        [
            lambda ids, positions: ids.sin().cumsum(0)[:, None],
            lambda ids, positions: (ids.sin() + ids.sin().roll(1))[:, None],
            lambda ids, positions: (ids + torch.arange(len(ids))).sin()[:, None],
            lambda ids, positions: (ids.sin() - ids.sin().mean())[:, None],
        ],
        ids=["recurrent", "convolution", "own positions", "mean"],
    )
    def test_otherwise(self, forward: Any) -> None:
        with pytest.raises(UnsupportedModelError, match="outside attention"):
            self.run(forward)

    def test_keys_count_even_where_they_do_not_show(self) -> None:
        def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            rows = collecting()
            assert rows is not None
            own = ids.sin()[:, None, None]
            return rows.attend(own, own + torch.arange(len(ids))[:, None, None], own)[:, 0]

        with pytest.raises(UnsupportedModelError, match="outside attention"):
            self.run(forward)
