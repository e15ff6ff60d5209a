"""Which functions must an implementation of the kernels offer, and what must they compute?

Layers call these through `registry.get_kernels()`. `reference` defines the results; another
implementation may round differently, but no more than the dtype's own error.
"""

from __future__ import annotations

from typing import Protocol

import torch

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV


class Kernels(Protocol):
    """The operations that models are made of.

    T: tokens; Hq, Hkv: query and KV heads; D: head size. Activations and weights share one dtype,
    float32, bfloat16 or float16, unless said otherwise. Arguments are left as they are unless said
    otherwise; a result may be written to by the caller.
    """

    name: str

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight.T + bias`: x [T, in], weight [out, in], bias [out] → [T, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + eps) · weight` over the last dimension of x [T, size].

        `weight` is [size] float32. All in float32, rounded to x's dtype once, at the end
        (Zhang and Sennrich 2019).
        """
        ...

    def qk_norm_rope(
        self,
        qk: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Normalise each head if a weight is given, then rotate it: qk [T, H, D] → [T, H, D].

        H counts query and key heads alike; `weight` [H, D] float32 is an RMS norm's, as in
        `rms_norm`. Element d < D/2 turns with element d + D/2 by the token's angle d (RoPE in the
        half-split form): `cos` [T, 1, D] float32 holds the cosines twice, `sin` the negated sines
        and then the sines. All in float32, rounded once, at the end. qk may be a strided view.
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) · up`: gate_up [T, 2 · size], gate first → [T, size]. May overwrite."""
        ...

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gelu(gate) · up`, GELU in its tanh form; shapes as `silu_and_mul`. May overwrite."""
        ...

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gelu(gate) · up`, GELU in its exact form; shapes as `silu_and_mul`. May overwrite."""
        ...

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: PagedKV,
        metadata: AttentionMetadata,
    ) -> None:
        """Write key and value [T, Hkv, D] of this step into the pages at `metadata.slot_mapping`.

        A negative slot is skipped, as are rows beyond the slot mapping. Must be called before
        `paged_attention` of the same layer and step.
        """
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: PagedKV,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D] over each request's whole context → [T, Hq, D].

        The query of a token at position a sees the keys j ≤ a, and with a window w of them only
        j > a - w: w keys, itself included. Scores are `scale · q·k`, with a cap c then
        `c · tanh(score / c)`, softmax in float32; query head h uses KV head h // (Hq / Hkv).
        `key` and `value` are this step's, as given to `reshape_and_cache`; the rest comes from the
        pages. Nothing at a position ≥ seq_len influences the result, whatever it holds.
        """
        ...
