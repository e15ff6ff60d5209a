"""Which functions make up the reference implementation?"""

from __future__ import annotations

from jubako.kernels.reference import (
    activation,
    attention,
    causal_conv,
    encoder_attention,
    gated_delta,
    gated_norm,
    kv_write,
    latent_attention,
    linear,
    moe,
    norm,
    selective_scan,
    ssd,
)


class ReferenceKernels:
    """`kernels.interface.Kernels` in PyTorch operators."""

    name = "reference"

    def use_threads(self, num_threads: int) -> None:
        """PyTorch has its own."""

    pack = staticmethod(linear.pack)
    pack_blocks = staticmethod(linear.pack_blocks)
    packed_linear = staticmethod(linear.no_packed_matrix)
    packed_gated_linear = staticmethod(linear.no_packed_matrix)
    packed_embedding = staticmethod(linear.no_packed_matrix)
    pack_experts = staticmethod(moe.pack_experts)
    packed_experts = staticmethod(linear.no_packed_matrix)
    linear = staticmethod(linear.linear)
    rms_norm = staticmethod(norm.rms_norm)
    layer_norm = staticmethod(norm.layer_norm)
    qk_norm_rope = staticmethod(norm.qk_norm_rope)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(activation.gelu_tanh_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    fused_experts = staticmethod(moe.fused_experts)
    reshape_and_cache = staticmethod(kv_write.reshape_and_cache)
    paged_attention = staticmethod(attention.paged_attention)
    encoder_attention = staticmethod(encoder_attention.encoder_attention)
    concat_and_cache_mla = staticmethod(latent_attention.concat_and_cache_mla)
    mla_attention = staticmethod(latent_attention.mla_attention)
    gated_rms_norm = staticmethod(gated_norm.gated_rms_norm)
    causal_conv1d = staticmethod(causal_conv.causal_conv1d)
    ssd_scan = staticmethod(ssd.ssd_scan)
    selective_scan = staticmethod(selective_scan.selective_scan)
    gated_delta_rule = staticmethod(gated_delta.gated_delta_rule)
