"""How are the settings that several families share written in config.json?

Transformers 4 and 5 write rotary parameters and layer types differently, and leave out what equals
a family's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jubako.checkpoint.entries import integer_or_none, mapping, number_or_none, show, value
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.layers.rotary import RopeParameters

__all__ = [
    "FULL",
    "SLIDING",
    "experts_per_token",
    "integer_or_none",
    "kv_heads",
    "layer_types",
    "make_rope_parameters",
    "mapping",
    "number_or_none",
    "rope_parameters",
    "value",
]

FULL = "full_attention"
SLIDING = "sliding_attention"


def kv_heads(hf_config: Mapping[str, Any], num_heads: int, default: int) -> int:
    """`num_key_value_heads`; one that is null means one for each query head."""
    null = "num_key_value_heads" in hf_config and hf_config["num_key_value_heads"] is None
    heads: int = value(hf_config, "num_key_value_heads", num_heads if null else default)
    return heads


def rope_parameters(
    hf_config: Mapping[str, Any], max_position_embeddings: int, default_theta: float = 10_000.0
) -> RopeParameters:
    """Rotary parameters of a model whose layers all rotate alike.

    In `rope_parameters` (transformers 5), or as `rope_theta` and `rope_scaling` (4).
    """
    new = mapping(hf_config, "rope_parameters")
    entries = mapping(hf_config, "rope_scaling") or new
    if isinstance(entries.get(FULL), Mapping):
        entries = entries[FULL]
    theta = value(hf_config, "rope_theta", default_theta)
    return make_rope_parameters(
        {**_top_level(hf_config), **entries}, theta, max_position_embeddings
    )


def make_rope_parameters(
    entries: Mapping[str, Any], theta: float, max_position_embeddings: int
) -> RopeParameters:
    """Rotary parameters from one dictionary of them; `theta` where it has none."""
    scaling = dict(entries)
    rope_type = scaling.pop("rope_type", None)
    old_name = scaling.pop("type", None)
    own_theta = scaling.pop("rope_theta", None)
    return RopeParameters(
        theta=float(value({"rope_theta": own_theta}, "rope_theta", float(theta))),
        rope_type=rope_type or old_name or "default",
        scaling=scaling,
        max_position_embeddings=max_position_embeddings,
    )


def _top_level(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("partial_rotary_factor", "original_max_position_embeddings")
    return {name: hf_config[name] for name in names if hf_config.get(name) is not None}


def experts_per_token(hf_config: Mapping[str, Any], default: int, num_experts: int) -> int:
    """`num_experts_per_tok`. `CheckpointError` where there are fewer experts than that."""
    count: int = value(hf_config, "num_experts_per_tok", min(default, num_experts))
    if count > num_experts:
        raise CheckpointError(
            f"num_experts_per_tok in config.json is {count}, but the model has only "
            f"{num_experts} experts."
        )
    return count


def layer_types(hf_config: Mapping[str, Any], num_layers: int, default: list[str]) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    types = hf_config.get("layer_types")
    if types is None:
        types = default
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(
            f"layer_types in config.json must be a list of strings, got {show(types)}."
        )
    if len(types) != num_layers:
        raise UnsupportedModelError(
            f"The model's config.json names {len(types)} layer_types for {num_layers} layers."
        )
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModelError(
            f"The model's layer type {sorted(unknown)[0]!r} is not supported; "
            f"known are {FULL} and {SLIDING}."
        )
    return types


def require_window(types: list[str], sliding_window: int | None) -> list[str]:
    """`types`, if there is a window for those that need one; UnsupportedModelError else."""
    if SLIDING in types and sliding_window is None:
        raise UnsupportedModelError(
            f"The model's config.json has layers of type {SLIDING}, "
            "but no sliding_window is in use."
        )
    return types


def late_window_layer_types(
    hf_config: Mapping[str, Any], num_layers: int, sliding_window: int | None
) -> list[str]:
    """Layer types of Qwen: the first `max_window_layers` see everything, if there is a window."""
    first = num_layers
    if sliding_window is not None:
        first = value(hf_config, "max_window_layers", 28, least=0)
    default = [SLIDING if i >= first else FULL for i in range(num_layers)]
    return layer_types(hf_config, num_layers, default)
