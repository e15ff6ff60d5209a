"""How do a checkpoint's tensors get into a model, each exactly once?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.layers.weights import StoredBlocks, TakesWeights, WeightTarget

_ROTARY_CACHES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor | StoredBlocks]],
    sanitize: Callable[[str], str | None],
) -> set[str]:
    """Put every tensor in its place and return the names that were used.

    `sanitize` turns a checkpoint's name into the model's own, or None for a tensor that is not
    wanted. Tensors are copied one at a time, or kept where they fit as they are (then the caller
    must not use them any more), so no second copy of the model ever exists. Raises
    UnsupportedModelError for a tensor without a place, and CheckpointError for one that has the
    wrong shape, comes twice or is missing.
    """
    targets = weight_targets(model)
    missing = dict.fromkeys(name for name, target in targets.items() if not target.parts)
    used = set()
    for name, tensor in weights:
        own_name = None if name.endswith(_ROTARY_CACHES) else sanitize(name)
        if own_name is None:
            continue
        if own_name not in targets and _changes_nothing(own_name, tensor, targets):
            continue
        if own_name not in targets:
            raise UnsupportedModelError(
                f"The checkpoint has a tensor {name!r} that {type(model).__name__} does not use; "
                "its config.json may not describe this checkpoint."
            )
        target = targets[own_name]
        filled = target.parts or (own_name,)
        if not missing.keys() >= set(filled):
            raise CheckpointError(f"The checkpoint has the tensor {name!r} twice.")
        if tuple(tensor.shape) != target.shape:
            raise CheckpointError(
                f"The checkpoint's tensor {name!r} has shape {list(tensor.shape)}; "
                f"its configuration calls for {list(target.shape)}."
            )
        if not isinstance(tensor, StoredBlocks):
            target.load(tensor)
        elif target.keep is not None:
            target.keep(tensor)
        else:
            target.load(tensor.expand(tensor.data))
        for part in filled:
            del missing[part]
        used.add(name)
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"The checkpoint lacks the tensor {next(iter(missing))!r}{others}.")
    return used


def _changes_nothing(
    name: str, tensor: torch.Tensor | StoredBlocks, targets: Mapping[str, WeightTarget]
) -> bool:
    """Whether it is the bias of a matrix without one, and 0: some quantisers write these."""
    stem, _, kind = name.rpartition(".")
    matrix = targets.get(f"{stem}.weight")
    if (
        isinstance(tensor, StoredBlocks)
        or kind != "bias"
        or matrix is None
        or len(matrix.shape) != 2
    ):
        return False
    return tuple(tensor.shape) == matrix.shape[:1] and not tensor.any()


def weight_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Every tensor the model takes, by the model's own name."""
    targets = {}
    for path, module in model.named_modules():
        if isinstance(module, TakesWeights):
            parent, _, name = path.rpartition(".")
            prefix = f"{parent}." if parent else ""
            for tensor_name, target in module.weight_targets(name):
                parts = tuple(prefix + part for part in target.parts)
                targets[prefix + tensor_name] = replace(target, parts=parts)
    return targets


def with_model_prefix(name: str) -> str:
    """The name with "model." before it, as checkpoints of the bare decoder lack it."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def text_part(name: str) -> str | None:
    """A multimodal checkpoint's tensor as a text model names it; None for one of another part.

    In the style of transformers 4 (`language_model.model.`) or 5 (`model.language_model.`).
    """
    if "vision_tower." in name or "multi_modal_projector." in name:
        return None
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")
