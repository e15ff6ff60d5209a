"""How do families that contain Mamba 2 layers write their sizes in config.json?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.layers.mamba2 import Mamba2Args
from jubako.models.hf_config import value

MAMBA = "mamba"
ATTENTION = "attention"
MLP = "mlp"
MOE = "moe"

_KINDS = {
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}
"""Names of kinds of layers in config.json, old and new."""


def time_step_limit(c: Mapping[str, Any]) -> tuple[float, float]:
    """The bounds of a step's length, `time_step_limit`; none where it is absent."""
    entry = c.get("time_step_limit")
    if entry is None:
        return 0.0, math.inf
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
        raise CheckpointError(
            f"time_step_limit in config.json must be two numbers, got {entry!r:.60}."
        )
    low, high = (_number(bound, entry) for bound in entry)
    return low, high


def _number(bound: Any, entry: Any) -> float:
    if isinstance(bound, Mapping):  # JSON has no infinity; transformers writes it as an object.
        bound = bound.get("__float__")
    try:
        return float(bound)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"time_step_limit in config.json must be two numbers, got {entry!r:.60}."
        ) from None


def layer_kinds(names: Any, num_layers: int, entry: str) -> list[str]:
    """The kind of each layer, from a list of names that stands in config.json as `entry`."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{entry} in config.json must be a list of strings.")
    if len(names) != num_layers:
        raise UnsupportedModelError(
            f"config.json names {len(names)} {entry} for {num_layers} layers."
        )
    unknown = set(names) - _KINDS.keys()
    if unknown:
        raise UnsupportedModelError(
            f"The layer type {sorted(unknown)[0]!r} in {entry} is not supported; known are "
            f"{', '.join(_KINDS)}."
        )
    return [_KINDS[name] for name in names]


def require_silu(c: Mapping[str, Any], entry: str) -> None:
    """UnsupportedModelError unless the convolution's activation, `entry`, is SiLU."""
    name = value(c, entry, "silu")
    if name not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{entry}={name!r} in config.json is not supported for Mamba layers; known is silu."
        )


def head_sizes(
    num_heads: int, head_dim: Any, intermediate_size: int, entry: str
) -> tuple[int, int]:
    """Heads and elements of a head, which `entry` may leave to be derived ("auto" or null)."""
    if head_dim in (None, "auto"):
        if intermediate_size % num_heads:
            raise UnsupportedModelError(
                f"{intermediate_size} elements cannot be divided among {num_heads} Mamba heads."
            )
        return num_heads, intermediate_size // num_heads
    size = value({entry: head_dim}, entry, 64)
    if size * num_heads != intermediate_size:
        raise UnsupportedModelError(
            f"{num_heads} Mamba heads of {entry}={size} are not the {intermediate_size} elements "
            "that the rest of config.json calls for."
        )
    return num_heads, size


def check_groups(num_heads: int, num_groups: int) -> None:
    """UnsupportedModelError unless the heads can be divided into groups."""
    if num_heads % num_groups:
        raise UnsupportedModelError(
            f"{num_heads} Mamba heads cannot be divided into {num_groups} groups."
        )


def mamba2_args(
    c: Mapping[str, Any],
    hidden_size: int,
    eps: float,
    *,
    default_state: int = 256,
    intermediate_size: int | None = None,
) -> Mamba2Args:
    """Mamba layers of the hybrids that name their entries `mamba_n_heads` and so on."""
    if intermediate_size is None:
        intermediate_size = value(c, "mamba_expand", 2) * hidden_size
    heads, head_dim = head_sizes(
        value(c, "mamba_n_heads", 128), c.get("mamba_d_head"), intermediate_size, "mamba_d_head"
    )
    groups = value(c, "mamba_n_groups", 1)
    check_groups(heads, groups)
    bias = value(c, "mamba_proj_bias", False)
    require_silu(c, "hidden_act")
    return Mamba2Args(
        hidden_size=hidden_size,
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=value(c, "mamba_d_state", default_state),
        conv_kernel=value(c, "mamba_d_conv", 4, least=2),
        conv_bias=value(c, "mamba_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        norm_eps=eps,
        time_step_limit=time_step_limit(c),
        norm_groups=groups,
    )


def attention_indices(c: Mapping[str, Any], num_layers: int) -> set[int]:
    """Which layers are attention, from `attn_layer_indices` (none where it is absent)."""
    indices = c.get("attn_layer_indices")
    if indices is None:
        return set()
    if not isinstance(indices, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < num_layers for i in indices
    ):
        raise CheckpointError(
            "attn_layer_indices in config.json must be a list of layer numbers below "
            f"{num_layers}, got {indices!r:.60}."
        )
    return set(indices)


def multipliers(c: Mapping[str, Any], entry: str, count: int) -> list[float]:
    """`count` numbers that stand in config.json as `entry`; ones where it is absent."""
    numbers = c.get(entry)
    if numbers is None:
        return [1.0] * count
    if not isinstance(numbers, list) or len(numbers) != count:
        raise CheckpointError(
            f"{entry} in config.json must be a list of {count} numbers, got {numbers!r:.60}."
        )
    return [float(value({entry: number}, entry, 1.0)) for number in numbers]
