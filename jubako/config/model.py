"""Which model runs, and in which precision?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jubako.config.options import check_types, option
from jubako.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """The model and how it computes.

    The fields after `seed` are filled when the checkpoint has been read (`engine.setup`);
    `hf_config` is the checkpoint's configuration in Hugging Face's names, also for GGUF.
    """

    model: str | None = option(
        None,
        "Hugging Face folder or GGUF file. Without one, the default model, Gemma 3 270M.",
        flags=("-m",),
    )
    tokenizer: str | None = option(None, "Folder or tokenizer.json, if not the model's own.")
    served_model_name: str | None = option(
        None, "Name of the model in the HTTP interface (default: the last part of --model)."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = option(
        "auto",
        "Precision of weights, activations and KV. auto: the checkpoint's (bfloat16 for quantised "
        "files) where the machine computes in it, else float32.",
    )
    max_model_len: int | None = option(
        None, "Longest context, prompt plus output, in tokens (default: the model's own)."
    )
    model_impl: Literal["auto", "native", "transformers"] = option(
        "auto",
        "Whose code computes the model: Jubako's own (native), or transformers' with Jubako's "
        "attention (auto: native where the architecture has it, else transformers).",
    )
    quantization: Literal["none", "int8", "int4", "gguf-native"] = option(
        "none",
        "How the native kernels hold weight matrices. none: in `dtype`; int8: a scale a row; int4: "
        "a scale for 32 neighbours; gguf-native: a GGUF file's own blocks.",
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "Whether the model writes text, or makes vectors and scores of prompts (auto: as its "
        "architecture and files say).",
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1 allows all.")
    seed: int = option(0, "Seed of the engine's own random numbers.")

    hf_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    architecture: str = ""
    vocab_size: int = 0
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    supported_tasks: tuple[str, ...] = ("generate",)
    """What the model can be asked for; of a pooling model the tasks of `PoolingParams`."""
    original_max_model_len: int | None = None
    """-1 where neither a length nor an amount of memory was asked for: the length may be fitted."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(
                f"max_model_len={self.max_model_len} must be at least 1.", "max_model_len"
            )
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must be at least 0.", "seed")
        if self.max_logprobs < -1:
            raise ConfigError(
                f"max_logprobs={self.max_logprobs} must be at least -1.", "max_logprobs"
            )

    @property
    def pools(self) -> bool:
        """Whether the model makes vectors and scores instead of text; once it has been read."""
        return self.runner == "pooling"

    @property
    def context_length(self) -> int:
        """`max_model_len`, once it is known."""
        if self.max_model_len is None:
            raise ConfigError("max_model_len is not known before the model has been read.")
        return self.max_model_len
