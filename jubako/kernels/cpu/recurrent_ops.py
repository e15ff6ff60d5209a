"""Which ops of a program go on from a state, and where do they find it?"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from jubako.kernels.cpu.library import F32, Memory, Pool
from jubako.kernels.cpu.pointwise_ops import PointwiseOps
from jubako.kernels.cpu.recorder import floats
from jubako.kernels.cpu.recording import RecordingError, Rows, StateName
from jubako.kernels.cpu.recurrent import (
    OP_CAUSAL_CONV,
    OP_GATED_DELTA,
    OP_SELECTIVE_SCAN,
    OP_SSD_SCAN,
    ConvArgs,
    DeltaArgs,
    RecurrentStep,
    ScanArgs,
    conv_floats,
    delta_floats,
    fill_recurrent_step,
    recurrent_scratch_bytes,
    selective_scan_floats,
    ssd_floats,
)
from jubako.kernels.cpu.tensors import DTYPES, pointer
from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.state_slots import StateSlots


class RecurrentOps(PointwiseOps):
    """Convolutions and recurrences. They compute in float32, whatever the model's dtype."""

    def __init__(self, dtype: torch.dtype, max_tokens: int, max_reqs: int, pool: Pool) -> None:
        super().__init__(dtype, max_tokens, max_reqs, pool)
        self._state_ops: dict[str, list[tuple[Any, str]]] = {}
        self._state_scratch_bytes = 0
        self._state_steps: list[tuple[RecurrentStep, Any]] = [(RecurrentStep(), None)]
        self._slots: list[StateSlots] = []

    def causal_conv(
        self,
        x: Rows,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: StateName,
        *,
        silu: bool,
    ) -> Rows:
        """As `Kernels.causal_conv1d`, of float32 rows."""
        channels, width = weight.shape
        taps, bias = weight.float().t().contiguous(), floats(bias)
        out = self.buffer("convolved", channels, F32)
        args = ConvArgs(
            x=x.address,
            x_stride=x.stride,
            weight=taps.data_ptr(),
            bias=pointer(bias),
            out=out.address,
            out_stride=out.stride,
            dtype=F32,
            channels=channels,
            width=width,
            silu=silu,
        )
        needed = conv_floats(channels, width, self._threads)
        self._state_op(OP_CAUSAL_CONV, args, state, needed, taps, bias)
        return out

    def ssd_scan(
        self,
        x: Rows,
        dt: Rows,
        a: torch.Tensor,
        b: Rows,
        c: Rows,
        d: torch.Tensor,
        state: StateName,
        groups: int,
    ) -> Rows:
        """As `Kernels.ssd_scan`, of float32 rows with all heads beside each other."""
        heads, size = dt.width, b.width // groups
        sizes = (heads, groups, x.width // heads, size)
        needed = ssd_floats(x.width // heads, size)
        return self._scan(OP_SSD_SCAN, (x, dt, b, c), a, d, state, sizes, needed)

    def selective_scan(
        self,
        x: Rows,
        dt: Rows,
        a: torch.Tensor,
        b: Rows,
        c: Rows,
        d: torch.Tensor,
        state: StateName,
    ) -> Rows:
        """As `Kernels.selective_scan`, of float32 rows."""
        sizes = (x.width, 1, 1, b.width)
        needed = selective_scan_floats(b.width)
        return self._scan(OP_SELECTIVE_SCAN, (x, dt, b, c), a, d, state, sizes, needed)

    def _scan(
        self,
        op: int,
        inputs: tuple[Rows, Rows, Rows, Rows],
        a: torch.Tensor,
        d: torch.Tensor,
        state: StateName,
        sizes: tuple[int, int, int, int],
        needed: int,
    ) -> Rows:
        x, dt, b, c = inputs
        assert {rows.dtype for rows in inputs} == {F32}, "recurrences take float32"
        a, d = a.float().contiguous(), d.float().contiguous()
        heads, groups, rows, size = sizes
        out = self.buffer("recurred", x.width, F32)
        args = ScanArgs(
            x=x.address,
            dt=dt.address,
            a=a.data_ptr(),
            b=b.address,
            c=c.address,
            d=d.data_ptr(),
            out=out.address,
            x_stride=x.stride,
            dt_stride=dt.stride,
            b_stride=b.stride,
            c_stride=c.stride,
            out_stride=out.stride,
            dtype=F32,
            heads=heads,
            groups=groups,
            rows=rows,
            size=size,
        )
        self._state_op(op, args, state, needed, a, d)
        return out

    def gated_delta(
        self,
        q: Rows,
        k: Rows,
        v: Rows,
        g: Rows,
        beta: Rows,
        state: StateName,
        key_heads: int,
    ) -> Rows:
        """As `Kernels.gated_delta_rule`, of float32 rows with all heads beside each other."""
        value_heads = g.width
        key_size, value_size = k.width // key_heads, v.width // value_heads
        out = self.buffer("recurred", v.width, F32)
        args = DeltaArgs(
            q=q.address,
            k=k.address,
            v=v.address,
            g=g.address,
            beta=beta.address,
            out=out.address,
            q_stride=q.stride,
            k_stride=k.stride,
            v_stride=v.stride,
            g_stride=g.stride,
            beta_stride=beta.stride,
            out_stride=out.stride,
            dtype=F32,
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=key_size,
            value_size=value_size,
        )
        self._state_op(OP_GATED_DELTA, args, state, delta_floats(key_size, value_size))
        return out

    def _state_op(self, op: int, args: Any, state: StateName, needed: int, *keep: Any) -> None:
        """Record an op that needs so many floats of scratch a thread."""
        if state.dtype not in DTYPES:
            raise RecordingError(f"states of {state.dtype}")
        args.step = ctypes.addressof(self._state_steps[0][0])
        args.state_dtype = DTYPES[state.dtype]
        self._op(op, args, *keep)
        self._state_ops.setdefault(state.layer_name, []).append((args, state.name))
        # A step may write a state for each token, at most.
        most = self._max_reqs + self.max_tokens
        self._state_scratch_bytes = max(
            self._state_scratch_bytes,
            recurrent_scratch_bytes(self._threads, self._max_reqs, most, needed),
        )

    def _finish_states(self) -> None:
        scratch = Memory(self._state_scratch_bytes)
        self._keep.append(scratch)
        for ops in self._state_ops.values():
            for args, _ in ops:
                args.scratch, args.scratch_bytes = scratch.address, scratch.num_bytes

    def _bind_states(self, layers: Mapping[str, Any]) -> None:
        """Use the states of these layers, which are of one KV group, if there are some."""
        names = [name for name in layers if name in self._state_ops]
        if not names:
            return
        step = RecurrentStep()
        self._state_steps = [s for s in self._state_steps if s[1] is not None]
        self._state_steps.append((step, layers[names[0]]))
        for name in names:
            for args, state_name in self._state_ops[name]:
                state = layers[name].states[state_name]
                args.step = ctypes.addressof(step)
                args.state = state.data_ptr()
                args.state_stride = state.stride(0)

    def _fill_states(
        self, attention: Mapping[str, AttentionMetadata] | None, num_tokens: int
    ) -> None:
        """Say where the step finds and leaves its states; without `attention` there are none."""
        if not self._state_ops:
            return
        self._slots.clear()
        for step, layer in self._state_steps:
            if attention is None or layer is None:
                slots = StateSlots.without_state(num_tokens)
            else:
                slots = layer.slots_of(attention[layer.layer_name])
            fill_recurrent_step(step, slots)
            # The op reads the arrays.
            self._slots.append(slots)
