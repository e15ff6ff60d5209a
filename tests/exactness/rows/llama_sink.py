"""A Llama whose layers have learned keys and values before position 0."""

from __future__ import annotations

from tests.exactness.sink_llama import LlamaSinkConfig
from tests.exactness.sizes import SMALL

CONFIGS = {
    "llama-sink": lambda: LlamaSinkConfig(
        **SMALL,
        num_hidden_layers=3,
        sink_len=48,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
}
