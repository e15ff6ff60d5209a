"""What is the attention half of a decoder block made of?"""

from __future__ import annotations

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import NativeRotation, Program, Rows, record, require_kind
from jubako.layers.attention import Attention
from jubako.layers.linear import QKVParallelLinear, RowParallelLinear
from jubako.layers.rotary import QKNormRope, QKRope, Rotation


class SelfAttention(nn.Module):
    """Projections, rotation, attention over the cache, and the projection back.

    `scale` is that of q·k, by default 1 / sqrt(head_size). `interleaved` as for `QKRope`. With
    `qk_norm_eps` query and key heads are normalised before they are rotated (`qk_norm_offset` is
    added to the norms' weights); every layer then has a rotation. `output_bias` is `bias` unless
    it is given.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        config: JubakoConfig,
        prefix: str,
        scale: float | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        interleaved: bool = False,
        qk_norm_eps: float | None = None,
        qk_norm_offset: float = 0.0,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sink_logits: bool = False,
        sink_len: int = 0,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(hidden_size, head_size, num_heads, num_kv_heads, bias)
        self.qk_norm_rope: nn.Module = QKRope(interleaved)
        if qk_norm_eps is not None:
            self.qk_norm_rope = QKNormRope(
                num_heads, num_kv_heads, head_size, qk_norm_eps, qk_norm_offset
            )
        self.attn = Attention(
            num_heads,
            head_size,
            head_size**-0.5 if scale is None else scale,
            num_kv_heads,
            config=config,
            layer_name=f"{prefix}.attn",
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            sink_logits=sink_logits,
            sink_len=sink_len,
        )
        output_bias = bias if output_bias is None else output_bias
        self.o_proj = RowParallelLinear(num_heads * head_size, hidden_size, output_bias)

    def forward(self, x: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]; a layer without positions gets no rotation."""
        qk, v = self.qkv_proj(x)
        if rotation is not None:
            qk = self.qk_norm_rope(qk, rotation)
        q, k = qk.split((self.attn.num_heads, self.attn.num_kv_heads), dim=1)
        return self.o_proj(self.attn(q, k, v))

    def record(
        self,
        program: Program,
        x: Rows,
        rotation: NativeRotation | None,
        *,
        to_stream: bool = False,
    ) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        qkv = self.qkv_proj.record(program, x, "qkv")
        shape = require_kind(self.attn, Attention).shape
        if rotation is None:
            attended = program.attention(qkv, shape, None)
        else:
            attended = record(self.qk_norm_rope, program, qkv, shape, rotation)
        return self.o_proj.record(program, attended, "delta", to_stream=to_stream)
