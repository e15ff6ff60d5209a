"""Which class runs which architecture?"""

from __future__ import annotations

from importlib import import_module

from torch import nn

from jubako.errors import UnsupportedModelError

_CLASSES: dict[str, tuple[str, str]] = {
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
}
"""Architecture as in config.json → module and class in this package."""


def supported_architectures() -> tuple[str, ...]:
    """Names of the architectures that can be loaded."""
    return tuple(_CLASSES)


def get_model_class(architecture: str) -> type[nn.Module]:
    """The class for an architecture; UnsupportedModelError for one that is not known."""
    if architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"The model's architecture {architecture!r} is not supported; "
            f"supported are {', '.join(_CLASSES)}."
        )
    module, name = _CLASSES[architecture]
    model_class: type[nn.Module] = getattr(import_module(f"jubako.models.{module}"), name)
    return model_class
