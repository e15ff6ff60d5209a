"""Which class runs which architecture?"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from torch import nn

from jubako.checkpoint.architecture import ENCODERS, take_apart
from jubako.errors import UnsupportedModelError

_CLASSES: dict[str, tuple[str, str]] = {
    "ArceeForCausalLM": ("arcee", "ArceeForCausalLM"),
    "BambaForCausalLM": ("bamba", "BambaForCausalLM"),
    "BartForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
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
    "WhisperForConditionalGeneration": ("whisper", "WhisperForConditionalGeneration"),
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


def get_model_class(
    architecture: str, *, pools: bool = False, implementation: str = "auto"
) -> type[nn.Module]:
    """The class for an architecture; UnsupportedModelError for one that is not known.

    With `pools` that of a decoder has no head over the vocabulary. `implementation` is
    `ModelConfig.model_impl`: with "auto" what is not known here may still be known to transformers.
    """
    if implementation == "transformers":
        return _through_transformers(architecture, pools)
    causal = take_apart(architecture).causal
    if pools and causal in _CLASSES:
        from jubako.models.pooling_decoder import pooling_class

        return pooling_class(architecture, get_model_class(causal))
    if architecture not in _CLASSES:
        if implementation == "native":
            raise refusal(
                architecture, "With model_impl=auto it runs through transformers, if that can."
            )
        return _through_transformers(architecture, pools)
    module, name = _CLASSES[architecture]
    model_class: type[nn.Module] = getattr(import_module(f"jubako.models.{module}"), name)
    return model_class


def _through_transformers(architecture: str, pools: bool) -> type[nn.Module]:
    if pools:
        raise refusal(architecture, "Through transformers models write text, and do not pool.")
    missing = "is not installed" if find_spec("transformers") is None else ""
    try:
        from jubako.models.transformers_fallback import TransformersForCausalLM
    except ImportError as error:
        missing = missing or f"is installed in a version that does not fit ({error})"
    if missing:
        raise refusal(
            architecture,
            f"It may run through transformers, which {missing}: "
            "pip install 'jubako[transformers]'.",
        )
    return TransformersForCausalLM


def refusal(architecture: str, reason: str) -> UnsupportedModelError:
    """The error for an architecture that cannot run, with `reason` and the nearest that can."""
    if architecture in _CLASSES:
        return UnsupportedModelError(f"The model's architecture is {architecture!r}. {reason}")
    near = nearest_architectures(architecture)
    hint = f"; the nearest supported ones are {', '.join(near)}" if near else ""
    return UnsupportedModelError(
        f"The model's architecture {architecture!r} is not supported{hint}. {reason}"
    )


def nearest_architectures(architecture: str) -> tuple[str, ...]:
    """Up to three supported architectures whose names are most like this one, the best first."""
    stems = {name: take_apart(name).stem.lower() for name in _CLASSES}
    stem = take_apart(architecture).stem.lower()
    near = get_close_matches(stem, dict.fromkeys(stems.values()), n=3, cutoff=0.7)
    return tuple(name for s in near for name in stems if stems[name] == s)[:3]
