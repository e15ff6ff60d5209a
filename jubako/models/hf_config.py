"""How are the settings that several families share written in config.json?

Transformers 4 and 5 write rotary parameters and layer types differently, and leave out what equals
a family's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jubako.errors import UnsupportedModelError
from jubako.layers.rotary import RopeParameters

FULL = "full_attention"
SLIDING = "sliding_attention"


def value(hf_config: Mapping[str, Any], name: str, default: Any) -> Any:
    """The entry `name`, or `default` where it is absent or null."""
    entry = hf_config.get(name)
    return default if entry is None else entry


def rope_parameters(
    hf_config: Mapping[str, Any], max_position_embeddings: int, default_theta: float = 10_000.0
) -> RopeParameters:
    """Rotary parameters of a model whose layers all rotate alike.

    In `rope_parameters` (transformers 5), or as `rope_theta` and `rope_scaling` (4).
    """
    entries = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
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
        theta=float(theta if own_theta is None else own_theta),
        rope_type=rope_type or old_name or "default",
        scaling=scaling,
        max_position_embeddings=max_position_embeddings,
    )


def _top_level(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("partial_rotary_factor", "original_max_position_embeddings")
    return {name: hf_config[name] for name in names if hf_config.get(name) is not None}


def layer_types(hf_config: Mapping[str, Any], num_layers: int, default: list[str]) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    types = list(value(hf_config, "layer_types", default))
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


def late_window_layer_types(
    hf_config: Mapping[str, Any], num_layers: int, sliding_window: int | None
) -> list[str]:
    """Layer types of Qwen: the first `max_window_layers` see everything, if there is a window."""
    first = value(hf_config, "max_window_layers", 28) if sliding_window is not None else num_layers
    default = [SLIDING if i >= first else FULL for i in range(num_layers)]
    return layer_types(hf_config, num_layers, default)
