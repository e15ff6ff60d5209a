"""Mixtral."""

from __future__ import annotations

import transformers

from tests.exactness.sizes import SMALL

CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_hidden_layers=3, num_local_experts=6, num_experts_per_tok=2
    )
}
