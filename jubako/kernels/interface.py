"""Which functions must an implementation of the kernels offer, and what must they compute?

Layers call these through `registry.get_kernels()`. `reference` defines the results; another
implementation may round differently, but no more than the dtype's own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from jubako.kernels.cpu.recording import ExpertRules
from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.paged_latent import PagedLatent
from jubako.kernels.state_slots import StateSlots


class Kernels(Protocol):
    """The operations that models are made of.

    T: tokens; Hq, Hkv: query and KV heads; D: head size. Activations and weights share one dtype,
    float32, bfloat16 or float16, unless said otherwise. Arguments are left as they are unless said
    otherwise; a result may be written to by the caller.
    """

    name: str

    def use_threads(self, num_threads: int) -> None:
        """Compute on that many threads from now on, where they are not PyTorch's."""
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight.T + bias`: x [T, in], weight [out, in], bias [out] → [T, out]."""
        ...

    def pack(
        self, weight: torch.Tensor, interleaved: bool = False, quantization: str = "none"
    ) -> Any:
        """`weight` [out, in] in the form that products read fastest; None: as it is.

        If `interleaved` it is a gate's matrix above an up's, for `packed_gated_linear`.
        `quantization` is that of `ModelConfig`. The result may share memory with `weight`, or have
        given it back: unless it is None, the content of `weight` is lost. Whoever gets None calls
        no function below on it.
        """
        ...

    def pack_blocks(self, pieces: Sequence[Any], interleaved: bool = False) -> Any:
        """As `pack`, of matrices below each other as a GGUF file stores them.

        A piece has `data` [rows, bytes] uint8, a `type` and a `shape`. None if there is no such
        form of them.
        """
        ...

    def packed_linear(
        self, x: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`linear` by a packed matrix that is not interleaved."""
        ...

    def packed_gated_linear(
        self, x: torch.Tensor, matrix: Any, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """`act(gate) · up` of `linear` by an interleaved matrix: x [T, in] → [T, out / 2].

        `activation` is "silu", "gelu" or "gelu_tanh", as in `silu_and_mul` and so on.
        """
        ...

    def packed_embedding(
        self, input_ids: torch.Tensor, matrix: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows `input_ids` [T] of a packed matrix → [T, in] of `dtype`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + eps) · weight` over the last dimension of x [T, size].

        `weight` is [size] float32. All in float32, rounded to x's dtype once, at the end
        (Zhang and Sennrich 2019).
        """
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """`(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias` over the last dimension of x.

        `weight` and `bias` are [size] float32, the variance is that of the population. All in
        float32, rounded to x's dtype once, at the end (Ba, Kiros and Hinton 2016).
        """
        ...

    def qk_norm_rope(
        self,
        qk: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float = 0.0,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Normalise each head if a weight is given, then rotate it: qk [T, H, D] → [T, H, D].

        H counts query and key heads alike; `weight` [H, D] float32 is an RMS norm's, as in
        `rms_norm`. The first R ≤ D elements of a head turn, the others stay: element d < R/2 with
        element d + R/2 by the token's angle d (RoPE in the half-split form), or if `interleaved`
        element 2d with element 2d + 1. In both forms `cos` [T, 1, R] float32 holds the cosines
        twice, `sin` the negated sines and then the sines. All in float32, rounded once, at the end.
        qk may be a strided view.
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

    def fused_experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        *,
        act: str = "silu",
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        limit: float | None = None,
        alpha: float = 1.702,
        weigh_input: bool = False,
    ) -> torch.Tensor:
        """`Σ weight · expert(x)` over the k experts of each token: x [T, hidden] → the same shape.

        Expert e computes `down[e] · act(gate_up[e] · x)` with its biases: `gate_up`
        [E, 2 · size, hidden], gate first, `down` [E, hidden, size], biases [E, 2 · size] and
        [E, hidden]. `weights` [T, k] float32, `expert_ids` [T, k] int64, no expert twice for a
        token. `act` is "silu", "gelu" or "gelu_tanh" as in the functions above, or
        "clamped_swiglu": `gate · sigmoid(alpha · gate) · (up + 1)` with gate at most `limit` and
        up within ±`limit`. With `weigh_input` the weight multiplies the input instead of the
        answer. Answers are summed in float32 in order of the expert's number.
        """
        ...

    def pack_experts(
        self, up: torch.Tensor, down: torch.Tensor, gated: bool = True, quantization: str = "none"
    ) -> tuple[Any, Any] | None:
        """Experts' matrices `up` and `down` in the form that products read fastest.

        `up` is `gate_up` of `fused_experts`, or of experts without a gate [E, size, hidden].
        Memory, `quantization` and a result of None as for `pack`.
        """
        ...

    def packed_experts(
        self,
        x: torch.Tensor,
        experts: tuple[Any, Any],
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        rules: ExpertRules,
    ) -> torch.Tensor:
        """`fused_experts` by packed matrices; without a gate `down[e] · act(up[e] · x)`.

        `act` is then "silu", "gelu", "gelu_tanh" or "relu2", the square of what is above 0.
        """
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
        attention_chunk_size: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D] over each request's whole context → [T, Hq, D].

        The query of a token at position a sees the keys j ≤ a, and with a window w of them only
        j > a - w: w keys, itself included. With a chunk size C, a multiple of the block size, it
        sees only the keys of its own chunk, j // C = a // C; a window and a chunk size exclude
        each other. `sinks` [Hq] adds `exp(sinks[h])` to the denominator of head h's softmax, which
        has no value: weights then sum to less than 1. Scores are `scale · q·k`, with a cap c then
        `c · tanh(score / c)`, softmax in float32; query head h uses KV head h // (Hq / Hkv).
        `key` and `value` are this step's, as given to `reshape_and_cache`; the rest comes from the
        pages. Nothing at a position ≥ seq_len influences the result, whatever it holds.

        Without `metadata.causal`, as in cross attention, a query sees every key j < seq_len, of
        which there may be fewer than queries; all come from the pages, and `key` and `value`, the
        queries themselves for want of others, are not read. There is no window or chunk size then.
        """
        ...

    def encoder_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attention of query [T, Hq, D] to all tokens of its request in the step → [T, Hq, D].

        Key and value [T, Hkv, D] are the step's own, which has whole requests; there are no pages.
        Scores are `scale · q·k`; query head h uses KV head h // (Hq / Hkv). Rows beyond the step's
        tokens are undefined.
        """
        ...

    def concat_and_cache_mla(
        self,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        kv: PagedLatent,
        metadata: AttentionMetadata,
    ) -> None:
        """Write latent [T, L], then key_rope [T, R], into the rows at `metadata.slot_mapping`.

        A negative slot is skipped, as are rows beyond the slot mapping. Must be called before
        `mla_attention` of the same layer and step.
        """
        ...

    def mla_attention(
        self,
        query: torch.Tensor,
        kv: PagedLatent,
        up: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Causal latent attention of query [T, H, P + R] over whole contexts → [T, H, V].

        (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.) `up` [H, P + V, L] holds each head's key
        and value matrices: a token with latent c and rotated key r has for head h the key
        `[up[h, :P] c; r]` and the value `up[h, P:] c`. Visibility and softmax as in
        `paged_attention`. Latents, this step's too, come from the pages. Extra memory is bounded
        by a constant and by what the context of one row, or the queries of one, take themselves.
        """
        ...

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = False,
    ) -> torch.Tensor:
        """`norm(x · silu(gate))`, or `norm(x) · silu(gate)`: x and gate [..., size] → like x.

        The norm is `rms_norm`'s over each `group_size` neighbours (default: all); `weight` [size]
        float32. All in float32, rounded once, at the end.
        """
        ...

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        slots: StateSlots,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """`Σ_j weight[:, j] · input[t - k + 1 + j] + bias` a channel, x [T, channels] → the same.

        `weight` [channels, k]. Inputs before a request's first token of the step are the k - 1 rows
        of `state` [blocks, k - 1, channels] that `slots` reads, oldest first, or zeros; the last
        k - 1 inputs up to each token that `slots` names are written. With `silu` the sum goes
        through it. All in float32, rounded once, at the end; `state` may be strided over blocks.
        """
        ...

    def ssd_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        state: torch.Tensor,
        slots: StateSlots,
    ) -> torch.Tensor:
        """The recurrence of Mamba 2 (Dao and Gu 2024) for x [T, H, P] → y [T, H, P].

        For each head, token by token: `S ← exp(dt · a) · S + dt · x ⊗ b`, `y = S · c + d · x`, with
        S [P, N]. `dt` [T, H] > 0, `a` [H] < 0 and `d` [H] are float32; b and c [T, G, N] are shared
        by the H / G heads of a group. S begins as what `slots` reads of `state`
        [blocks, H, P, N], or as zeros, and is written where `slots` says; `state` may be strided
        over blocks and of another dtype. All in float32, rounded where stored.
        """
        ...

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        state: torch.Tensor,
        slots: StateSlots,
    ) -> torch.Tensor:
        """The recurrence of Mamba (Gu and Dao 2023, arXiv 2312.00752): x [T, C] → the same.

        For each channel, token by token: `S ← exp(dt · a) · S + dt · x · b`, `y = S·c + d · x`,
        with S [N]. `dt` [T, C] > 0, `a` [C, N] < 0 and `d` [C] are float32; b and c [T, N] are
        shared by all channels. S begins as what `slots` reads of `state` [blocks, C, N], or as
        zeros, and is written where `slots` says; `state` may be strided over blocks and of another
        dtype. All in float32, rounded where stored.
        """
        ...

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        slots: StateSlots,
    ) -> torch.Tensor:
        """The gated delta rule (Yang et al. 2024, arXiv 2412.06464): v [T, Hv, Dv] → the same.

        For each head, token by token: `S ← exp(g) · S`, `S ← S + beta · (v - S·k) ⊗ k`,
        `y = S · q`, with S [Dv, Dk]. `g` ≤ 0 and `beta` [T, Hv] are float32. Value head h uses
        head h // (Hv / Hk) of q and k [T, Hk, Dk], each divided by its length,
        `sqrt(sum(x²) + 1e-6)`, and q by sqrt(Dk) too. S begins as what `slots` reads of `state`
        [blocks, Hv, Dv, Dk], or as zeros, and is written where `slots` says; `state` may be
        strided over blocks and of another dtype. All in float32, rounded where stored.
        """
        ...
