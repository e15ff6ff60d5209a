"""What do the native ops of recurrent layers take, and how are they run?

Mirrors `native/recurrent/args.h`. What an op does not take the reference computes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from jubako.kernels.cpu.library import RECURRENT_OPS, Pool, Scratch
from jubako.kernels.cpu.tensors import DTYPES, address, pointer
from jubako.kernels.reference.kernels import ReferenceKernels
from jubako.kernels.state_slots import StateSlots

OP_CAUSAL_CONV = RECURRENT_OPS
OP_SSD_SCAN = RECURRENT_OPS + 1
OP_SELECTIVE_SCAN = RECURRENT_OPS + 2
OP_GATED_DELTA = RECURRENT_OPS + 3

_P = ctypes.c_void_p
_I = ctypes.c_int32
_L = ctypes.c_int64


class RecurrentStep(ctypes.Structure):
    """One step, seen by the recurrent layers of one KV cache group; see `StateSlots`."""

    _fields_ = [
        ("num_reqs", _L),
        ("num_writes", _L),
        *((name, _P) for name in ("query_start_loc", "read_blocks")),
        *((name, _P) for name in ("write_requests", "write_tokens", "write_blocks")),
    ]


class ConvArgs(ctypes.Structure):
    """A causal convolution."""

    _fields_ = [
        ("step", _P),
        ("x", _P),
        ("x_stride", _L),
        ("weight", _P),
        ("bias", _P),
        ("out", _P),
        ("out_stride", _L),
        ("state", _P),
        ("state_stride", _L),
        *((name, _I) for name in ("dtype", "state_dtype", "channels", "width", "silu")),
        ("scratch", _P),
        ("scratch_bytes", _L),
    ]


class ScanArgs(ctypes.Structure):
    """The recurrence of Mamba 1 or 2."""

    _fields_ = [
        *((name, _P) for name in ("step", "x", "dt", "a", "b", "c", "d", "out", "state")),
        *((name, _L) for name in ("x_stride", "dt_stride", "b_stride", "c_stride")),
        *((name, _L) for name in ("out_stride", "state_stride")),
        *((name, _I) for name in ("dtype", "state_dtype", "heads", "groups", "rows", "size")),
        ("scratch", _P),
        ("scratch_bytes", _L),
    ]


class DeltaArgs(ctypes.Structure):
    """The gated delta rule."""

    _fields_ = [
        *((name, _P) for name in ("step", "q", "k", "v", "g", "beta", "out", "state")),
        *((name, _L) for name in ("q_stride", "k_stride", "v_stride", "g_stride")),
        *((name, _L) for name in ("beta_stride", "out_stride", "state_stride")),
        *((name, _I) for name in ("dtype", "state_dtype", "key_heads", "value_heads")),
        *((name, _I) for name in ("key_size", "value_size")),
        ("scratch", _P),
        ("scratch_bytes", _L),
    ]


class RecurrentKernels(ReferenceKernels):
    """What recurrent layers need of `kernels.interface.Kernels`, in native code on one pool."""

    def __init__(self, pool: Pool) -> None:
        self.use_pool(pool)

    def use_pool(self, pool: Pool) -> None:
        """Run there from now on."""
        self.pool = pool
        self._recurrent_scratch = Scratch()

    def causal_conv1d(  # type: ignore[override]
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        slots: StateSlots,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """See `Kernels.causal_conv1d`."""
        if not (_takes(x) and _takes_state(state)):
            return super().causal_conv1d(x, weight, bias, state, slots, silu=silu)
        channels, width = weight.shape
        taps = weight.detach().float().t().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        args = ConvArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=taps.data_ptr(),
            bias=pointer(bias),
            out=out.data_ptr(),
            out_stride=channels,
            dtype=DTYPES[x.dtype],
            channels=channels,
            width=width,
            silu=silu,
        )
        floats = conv_floats(channels, width, self.pool.num_threads)
        self._run(OP_CAUSAL_CONV, args, state, slots, floats)
        return out

    def ssd_scan(  # type: ignore[override]
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
        """See `Kernels.ssd_scan`."""
        if not _takes_all((x, b, c), state):
            return super().ssd_scan(x, dt, a, b, c, d, state, slots)
        heads, rows = x.shape[1:]
        groups, size = b.shape[1:]
        floats = ssd_floats(rows, size)
        return self._scan(
            OP_SSD_SCAN, (x, dt, a, b, c, d), state, slots, (heads, groups, rows, size), floats
        )

    def selective_scan(  # type: ignore[override]
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
        """See `Kernels.selective_scan`."""
        if not _takes_all((x, b, c), state):
            return super().selective_scan(x, dt, a, b, c, d, state, slots)
        channels, size = a.shape
        floats = selective_scan_floats(size)
        return self._scan(
            OP_SELECTIVE_SCAN, (x, dt, a, b, c, d), state, slots, (channels, 1, 1, size), floats
        )

    def _scan(
        self,
        op: int,
        inputs: tuple[torch.Tensor, ...],
        state: torch.Tensor,
        slots: StateSlots,
        sizes: tuple[int, int, int, int],
        floats: int,
    ) -> torch.Tensor:
        x, dt, a, b, c, d = inputs
        dt = dt if dt.stride(-1) == 1 else dt.contiguous()
        a, d = a.detach().float().contiguous(), d.detach().float().contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        heads, groups, rows, size = sizes
        args = ScanArgs(
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            d=d.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            out_stride=out.stride(0),
            dtype=DTYPES[x.dtype],
            heads=heads,
            groups=groups,
            rows=rows,
            size=size,
        )
        self._run(op, args, state, slots, floats)
        return out

    def gated_delta_rule(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        slots: StateSlots,
    ) -> torch.Tensor:
        """See `Kernels.gated_delta_rule`."""
        if not _takes_all((q, k, v), state):
            return super().gated_delta_rule(q, k, v, g, beta, state, slots)
        g = g if g.stride(-1) == 1 else g.contiguous()
        beta = beta if beta.stride(-1) == 1 else beta.contiguous()
        key_heads, key_size = k.shape[1:]
        value_heads, value_size = v.shape[1:]
        out = torch.empty(v.shape, dtype=v.dtype)
        args = DeltaArgs(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            g=g.data_ptr(),
            beta=beta.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            g_stride=g.stride(0),
            beta_stride=beta.stride(0),
            out_stride=out.stride(0),
            dtype=DTYPES[v.dtype],
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=key_size,
            value_size=value_size,
        )
        self._run(OP_GATED_DELTA, args, state, slots, delta_floats(key_size, value_size))
        return out

    def _run(
        self,
        op: int,
        args: ConvArgs | ScanArgs | DeltaArgs,
        state: torch.Tensor,
        slots: StateSlots,
        floats: int,
    ) -> None:
        """Run `op`, which needs so many floats of scratch a thread."""
        step = slots.plans.get("native")
        if step is None:
            step = slots.plans["native"] = RecurrentStep()
            fill_recurrent_step(step, slots)
        args.step = ctypes.addressof(step)
        args.state = state.data_ptr()
        args.state_stride = state.stride(0)
        args.state_dtype = DTYPES[state.dtype]
        needed = recurrent_scratch_bytes(
            self.pool.num_threads, step.num_reqs, step.num_writes, floats
        )
        self._recurrent_scratch.run(self.pool, op, args, needed)


def fill_recurrent_step(step: RecurrentStep, slots: StateSlots) -> None:
    """Let `step` say what `slots` says, whose arrays it points to."""
    step.num_reqs = len(slots.read_blocks)
    step.num_writes = len(slots.write_blocks)
    step.query_start_loc = _address(slots.query_start_loc)
    step.read_blocks = _address(slots.read_blocks)
    step.write_requests = _address(slots.write_requests)
    step.write_tokens = _address(slots.write_tokens)
    step.write_blocks = _address(slots.write_blocks)


def recurrent_scratch_bytes(threads: int, num_reqs: int, num_writes: int, floats: int) -> int:
    """Scratch of an op that needs so many floats a thread, for at most so many requests."""
    return threads * (4 * (num_reqs + num_writes) + 128 + 4 * floats + 64)


def conv_floats(channels: int, width: int, threads: int) -> int:
    """Floats a thread that a convolution needs."""
    pieces = -(-channels // 64)
    return (width + 1) * 64 * -(-pieces // threads)


def ssd_floats(rows: int, size: int) -> int:
    """Floats a thread that Mamba 2 with heads of `rows` elements and states of `size` needs."""
    return _pad(rows, 4) * _pad(size) + 2 * _pad(size) + 3 * _pad(rows)


def selective_scan_floats(size: int) -> int:
    """Floats a thread that Mamba with states of `size` needs."""
    return 34 * _pad(size) + 32


def delta_floats(key_size: int, value_size: int) -> int:
    """Floats a thread that the gated delta rule needs."""
    return _pad(value_size, 4) * _pad(key_size) + 2 * _pad(key_size) + 2 * _pad(value_size)


def _address(array: np.ndarray[Any, Any]) -> int:
    assert array.dtype == np.int64, "slots are int64"
    assert array.flags.c_contiguous, "slots are contiguous"
    return address(array)


def _takes(x: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the rows of x, one a token, are contiguous and of a type that is taken."""
    inner = x[0].is_contiguous() if len(x) else True
    return x.device.type == "cpu" and inner and x.dtype in DTYPES and dtype in (None, x.dtype)


def _takes_all(inputs: tuple[torch.Tensor, ...], state: torch.Tensor) -> bool:
    return all(_takes(x, inputs[0].dtype) for x in inputs) and _takes_state(state)


def _takes_state(state: torch.Tensor) -> bool:
    return state.dtype in DTYPES and (len(state) == 0 or state[0].is_contiguous())


def _pad(n: int, to: int = 16) -> int:
    return -(-n // to) * to
