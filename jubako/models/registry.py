"""Which class runs which architecture?"""

from __future__ import annotations

from importlib import import_module

from torch import nn

from jubako.checkpoint.architecture import ENCODERS, take_apart
from jubako.errors import UnsupportedModelError

_CLASSES: dict[str, tuple[str, str]] = {
    "BambaForCausalLM": ("bamba", "BambaForCausalLM"),
    "Cohere2ForCausalLM": ("cohere2", "Cohere2ForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek", "DeepseekForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek", "DeepseekForCausalLM"),
    "Glm4MoeLiteForCausalLM": ("deepseek", "DeepseekForCausalLM"),
    "YoutuForCausalLM": ("deepseek", "DeepseekForCausalLM"),
    "FalconH1ForCausalLM": ("falcon_h1", "FalconH1ForCausalLM"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2ForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM"),
    "GptOssForCausalLM": ("gpt_oss", "GptOssForCausalLM"),
    "GraniteForCausalLM": ("granite", "GraniteForCausalLM"),
    "Llama4ForCausalLM": ("llama4", "Llama4ForCausalLM"),
    "Llama4ForConditionalGeneration": ("llama4", "Llama4ForCausalLM"),
    "GraniteMoeHybridForCausalLM": ("granite_hybrid", "GraniteMoeHybridForCausalLM"),
    "JambaForCausalLM": ("jamba", "JambaForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "LlamaSinkForCausalLM": ("llama", "LlamaForCausalLM"),
    "Mamba2ForCausalLM": ("mamba2", "Mamba2ForCausalLM"),
    "Ministral3ForCausalLM": ("ministral3", "Ministral3ForCausalLM"),
    "MinistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Mistral3ForConditionalGeneration": ("ministral3", "Ministral3ForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "NemotronHForCausalLM": ("nemotron_h", "NemotronHForCausalLM"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2ForCausalLM"),
    "Olmo3ForCausalLM": ("olmo2", "Olmo2ForCausalLM"),
    "Phi3ForCausalLM": ("phi3", "Phi3ForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "Qwen3NextForCausalLM": ("qwen3_next", "Qwen3NextForCausalLM"),
    "SmolLM3ForCausalLM": ("smollm3", "SmolLM3ForCausalLM"),
    "StableLmForCausalLM": ("stablelm", "StableLmForCausalLM"),
}
"""Architecture as in config.json → module and class in this package."""


_CLASSES |= {
    stem + ending: ("bert", "BertForPooling")
    for stem in ENCODERS
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
}


def supported_architectures() -> tuple[str, ...]:
    """Names of the architectures that can be loaded."""
    return tuple(_CLASSES)


def get_model_class(architecture: str, *, pools: bool = False) -> type[nn.Module]:
    """The class for an architecture; UnsupportedModelError for one that is not known.

    With `pools` that of a decoder has no head over the vocabulary.
    """
    causal = take_apart(architecture).causal
    if pools and causal in _CLASSES:
        from jubako.models.pooling_decoder import pooling_class

        return pooling_class(architecture, get_model_class(causal))
    if architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"The model's architecture {architecture!r} is not supported; "
            f"supported are {', '.join(_CLASSES)}."
        )
    module, name = _CLASSES[architecture]
    model_class: type[nn.Module] = getattr(import_module(f"jubako.models.{module}"), name)
    return model_class
