"""gpt-oss."""

from __future__ import annotations

import transformers

from tests.exactness.sizes import SMALL

CONFIGS = {
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SMALL,
        num_hidden_layers=4,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=72,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    )
}
