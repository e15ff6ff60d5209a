"""Which ops of a program compute element by element?"""

from __future__ import annotations

import math

import torch

from jubako.kernels.cpu import elementwise as ew
from jubako.kernels.cpu.library import F32
from jubako.kernels.cpu.recorder import Recorder, floats
from jubako.kernels.cpu.recording import GatedNormWeights, RecordingError, Rows
from jubako.kernels.cpu.tensors import address, pointer


class PointwiseOps(Recorder):
    """Activations, gates, and what depends on positions alone."""

    def pointwise(
        self,
        x: Rows,
        function: str,
        role: str | None,
        *,
        bias: torch.Tensor | None = None,
        factor: torch.Tensor | float | None = None,
        limits: tuple[float, float] = (-math.inf, math.inf),
        dtype: int = F32,
    ) -> Rows:
        """`function(x + bias)`, kept within `limits`, times `factor`; without a `role` in place."""
        if function not in ew.FUNCTIONS:
            raise RecordingError(f"activation {function}")
        out = x if role is None else self.buffer(role, x.width, dtype)
        if isinstance(factor, float):
            factor = torch.full((x.width,), factor)
        bias, factor = floats(bias), floats(factor)
        args = ew.PointwiseArgs(
            rows=self._tokens,
            x=x.address,
            y=out.address,
            bias=pointer(bias),
            factor=pointer(factor),
            size=x.width,
            ldx=x.stride,
            ldy=out.stride,
            x_dtype=x.dtype,
            y_dtype=out.dtype,
            function=ew.FUNCTIONS[function],
            low=limits[0],
            high=limits[1],
        )
        self._op(ew.OP_POINTWISE, args, bias, factor)
        return out

    def gate(
        self, x: Rows, gate: Rows, function: str, role: str | None, *, to_stream: bool = False
    ) -> Rows:
        """`x · function(gate)` in the model's dtype, in place without a `role`, or added to the
        stream. A gate one wide belongs to the whole row."""
        if to_stream:
            out = self._the_stream()
        else:
            out = x if role is None else self.buffer(role, x.width, self.dtype)
        args = ew.GateArgs(
            rows=self._tokens,
            x=x.address,
            gate=gate.address,
            y=out.address,
            size=x.width,
            ldx=x.stride,
            ld_gate=gate.stride,
            ldy=out.stride,
            x_dtype=x.dtype,
            gate_dtype=gate.dtype,
            y_dtype=out.dtype,
            function=ew.FUNCTIONS[function],
            one=gate.width == 1,
            add=to_stream,
        )
        self._op(ew.OP_GATE, args)
        return out

    def gated_mul(self, x: Rows, activation: str, role: str) -> Rows:
        """`act(gate) · up` of the two halves of x, in the model's dtype."""
        out = self.buffer(role, x.width // 2, self.dtype)
        args = ew.GatedActivationArgs(
            rows=self._tokens,
            x=x.address,
            y=out.address,
            size=out.width,
            ldx=x.stride,
            ldy=out.stride,
            x_dtype=x.dtype,
            y_dtype=out.dtype,
            activation=ew.ACTIVATIONS[activation],
        )
        self._op(ew.OP_GATED_ACTIVATION, args)
        return out

    def gated_norm(self, x: Rows, gate: Rows, norm: GatedNormWeights, role: str) -> Rows:
        """x, gated and normalised, in the model's dtype."""
        out = self.buffer(role, x.width, self.dtype)
        weight = norm.weight.float().repeat(x.width // len(norm.weight))
        args = ew.GatedNormArgs(
            rows=self._tokens,
            x=x.address,
            gate=gate.address,
            y=out.address,
            weight=weight.data_ptr(),
            size=x.width,
            group=norm.group_size,
            ldx=x.stride,
            ld_gate=gate.stride,
            ldy=out.stride,
            x_dtype=x.dtype,
            gate_dtype=gate.dtype,
            y_dtype=out.dtype,
            norm_first=norm.norm_first,
            eps=norm.eps,
        )
        self._op(ew.OP_GATED_NORM, args, weight)
        return out

    def position_scale(self, scale: float, offset: float, every: float) -> Rows:
        """Of each token `1 + scale · log(1 + floor((position + offset) / every))`, one wide."""
        out = self.buffer(f"scale{len(self._ops)}", 1, F32)
        args = ew.PositionScaleArgs(
            rows=self._tokens,
            positions=address(self.positions),
            y=out.address,
            ldy=out.stride,
            scale=scale,
            offset=offset,
            every=every,
        )
        self._op(ew.OP_POSITION_SCALE, args)
        return out
