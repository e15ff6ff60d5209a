"""What does a model that is not ours ask of attention? Found by running it on nothing.

Such a model calls a function where attention belongs. One pass without memory (on PyTorch's meta
device) shows which of its modules call, with what shapes and which mask; a second pass, with
weights, shows whether tokens meet anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jubako.errors import UnsupportedModelError

MaskRule = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Batch index, head, query position and key position → whether the query sees the key."""

_CHANGES_NOTHING = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}
"""Arguments that are understood here, or that say nothing about the result."""


@dataclass(frozen=True)
class AttentionCall:
    """What one module asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: str | None
    """The module's parameter [Hq] that joins the softmax's denominators."""


@dataclass
class Trace:
    """The calls of one pass over a model whose context has `length` tokens."""

    length: int
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    """By `id` of the module."""
    rules: list[tuple[torch.Tensor, MaskRule | None]] = field(default_factory=list)
    """The masks that were handed out, and what they stand for. None: causal."""

    def mask(self, rule: MaskRule | None) -> torch.Tensor:
        """A tensor that stands for the mask `rule`."""
        stand_in = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta")
        self.rules.append((stand_in, rule))
        return stand_in

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Note what is asked, and answer with zeros [1, T, Hq, D]. q, k and v are [1, H, T, D].

        UnsupportedModelError for anything that the attention over the cache does not do.
        """
        name = type(module).__name__
        if id(module) in self.calls:
            raise UnsupportedModelError(
                f"{name} attends twice in one pass, so one cache a layer is not enough."
            )
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise UnsupportedModelError(
                f"{name} has query, key and value heads of sizes {q.shape[-1]}, {k.shape[-1]} and "
                f"{v.shape[-1]} (latent attention, for one, has such); they must be equal."
            )
        if k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
            raise UnsupportedModelError(
                f"{name} attends with {q.shape[1]} query heads of {q.shape[2]} tokens to "
                f"{k.shape[1]} KV heads of {k.shape[2]} tokens, which is not self-attention."
            )
        for option, given in options.items():
            if option not in _CHANGES_NOTHING and given is not None and given is not False:
                raise UnsupportedModelError(
                    f"{name} asks attention for {option}, which is not supported."
                )
        if not options.get("is_causal", getattr(module, "is_causal", True)):
            raise UnsupportedModelError(f"{name} sees tokens that follow (it is not causal).")
        window = self._window(name, mask)
        asked = options.get("sliding_window")
        if asked is not None and asked < self.length and asked != window:
            raise UnsupportedModelError(
                f"{name} asks for a window of {asked} tokens, and its mask has {window or 'none'}."
            )
        scale = options.get("scaling")
        self.calls[id(module)] = AttentionCall(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_size=q.shape[-1],
            scale=q.shape[-1] ** -0.5 if scale is None else _number(name, "scaling", scale),
            sliding_window=window,
            logits_soft_cap=_cap(name, options.get("softcap")),
            sinks=_sinks(module, q.shape[1], options.get("s_aux")),
        )
        return q.transpose(1, 2)

    def _window(self, name: str, mask: torch.Tensor | None) -> int | None:
        """How many tokens a query sees; None for all of the context."""
        if mask is None:
            return None
        known = [rule for stand_in, rule in self.rules if stand_in is mask]
        if not known:
            raise UnsupportedModelError(
                f"{name} adds something of its own to the scores of attention, such as relative "
                "positions or ALiBi."
            )
        return None if known[0] is None else _window_of(name, known[0], self.length)


def _number(name: str, option: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise UnsupportedModelError(f"{name} gives attention a {option} that is no plain number.")
    return float(given)


def _cap(name: str, given: Any) -> float | None:
    return None if given is None else _number(name, "softcap", given)


def _sinks(module: nn.Module, num_heads: int, given: Any) -> str | None:
    if given is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is given and tuple(parameter.shape) == (num_heads,):
            return name
    raise UnsupportedModelError(
        f"{type(module).__name__} gives attention sinks that are no parameter of its own."
    )


def _window_of(name: str, rule: MaskRule, length: int) -> int | None:
    """The window that `rule` amounts to in a context of `length` tokens; None if it has no effect.

    The rule is asked about a few rows, of which the last is long enough to show the window.
    """
    keys = torch.arange(length, device="cpu")
    rows = sorted({0, length // 3, length // 2, length - 1})
    seen = [_row(rule, query, keys) for query in rows]
    window = max(1, int(seen[-1].sum()))
    for query, row in zip(rows, seen):
        if not torch.equal(row, (keys <= query) & (keys > query - window)):
            raise UnsupportedModelError(
                f"{name} has a mask that is neither causal nor a sliding window."
            )
    return window if window < length else None


def _row(rule: MaskRule, query: int, keys: torch.Tensor) -> torch.Tensor:
    seen = rule(0, 0, torch.tensor(query, device="cpu"), keys)
    if seen.device != keys.device:
        raise UnsupportedModelError("A mask depends on more than positions.")
    return seen.expand(keys.shape)


class SubmodulesCalled:
    """Which submodule's result does a model's own `forward` work on?"""

    def __init__(self, model: nn.Module) -> None:
        self.direct: list[tuple[str, Any]] = []
        """Name and result of each submodule that the model itself called, in order."""
        self._depth = 0
        self._handles = []
        for name, module in model.named_modules():
            if name:
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave(name)))

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        self._depth += 1

    def _leave(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            self._depth -= 1
            if self._depth == 0:
                self.direct.append((name, output))

        return leave

    def forget(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()


# -- tokens meet in attention alone -------------------------------------------------------------


@dataclass
class Rows:
    """What a pass computed for each token: query, keys and values of all layers, and the end."""

    kept: list[torch.Tensor] = field(default_factory=list)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v [T, H, D] → [T, Hq, D]: every token gets its own value."""
        self.kept += [q, k, v]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


_collecting: ContextVar[Rows | None] = ContextVar("_collecting", default=None)


def collecting() -> Rows | None:
    """Where this pass keeps its rows, if it does."""
    return _collecting.get()


@contextmanager
def collect_rows() -> Iterator[Rows]:
    """Keep what each token has, and let no token see another, in the passes within."""
    rows = Rows()
    token = _collecting.set(rows)
    try:
        yield rows
    finally:
        _collecting.reset(token)


SAMPLE_TOKENS = 8
SAME = 0.05
"""Relative difference that roundings of another order of rows may make, in bfloat16 too."""


def require_attention_alone(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    vocab_size: int,
    length: int,
    device: torch.device,
) -> None:
    """Run a few tokens, then some of them in another order: each must come to the same.

    `forward` takes ids [T] and positions [T]. UnsupportedModelError for a model in which tokens
    meet outside attention, or that does not use the positions that it is given.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    count = SAMPLE_TOKENS
    ids = torch.randint(vocab_size, (count,), generator=generator)
    positions = torch.arange(count).remainder(min(length, count - 3))
    order = torch.tensor([5, 2, 7, 0, 3, 6])
    found = []
    for way in (torch.arange(count), order):
        with collect_rows() as rows:
            hidden = forward(ids[way].to(device), positions[way].to(device))
        found.append([row.float().flatten(1).cpu() for row in (*rows.kept, hidden)])
    for first, second in zip(*found, strict=True):
        first = first[order]
        if (first - second).abs().sum() > SAME * first.abs().sum():
            raise UnsupportedModelError(
                "Its tokens meet outside attention (a recurrent state, a convolution, or positions "
                "of its own counting), which the cache does not keep."
            )
