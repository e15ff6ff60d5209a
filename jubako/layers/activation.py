"""Which activations do MLPs use?"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from jubako.errors import UnsupportedModelError
from jubako.kernels.registry import get_kernels

_KERNELS = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """`act(gate) · up` for an activation by its name in config.json.

    The function takes [T, 2 · size], gate first, which it may overwrite, and returns [T, size].
    Raises UnsupportedModelError for an unknown name.
    """
    if name not in _KERNELS:
        raise UnsupportedModelError(
            f"The model's activation {name!r} is not supported; known are {', '.join(_KERNELS)}."
        )
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(get_kernels(), _KERNELS[name])
    return function


def gated_form(name: str) -> str:
    """Which of "silu", "gelu" and "gelu_tanh" a gated activation is; names as above."""
    return _KERNELS[name].removesuffix("_and_mul")


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square_()


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu_squared,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


_PLAIN_FORMS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


def plain_form(name: str) -> str:
    """What a native program calls an activation without a gate; names as below."""
    return _PLAIN_FORMS.get(name, name)


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of that name in config.json, without a gate: any shape → the same.

    Raises UnsupportedModelError for an unknown name.
    """
    if name not in _PLAIN:
        raise UnsupportedModelError(
            f"The model's activation {name!r} is not supported; known are {', '.join(_PLAIN)}."
        )
    return _PLAIN[name]
