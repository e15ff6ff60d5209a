"""Which functions make up the reference implementation?"""

from __future__ import annotations

from jubako.kernels.reference import activation, attention, kv_write, linear, norm


class ReferenceKernels:
    """`kernels.interface.Kernels` in PyTorch operators."""

    name = "reference"

    linear = staticmethod(linear.linear)
    rms_norm = staticmethod(norm.rms_norm)
    qk_norm_rope = staticmethod(norm.qk_norm_rope)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(activation.gelu_tanh_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    reshape_and_cache = staticmethod(kv_write.reshape_and_cache)
    paged_attention = staticmethod(attention.paged_attention)
