"""Which models have recurrent layers, and which of their states are kept for re-use?

Known from the architecture's name alone: a front end completes the options without loading a
model.
"""

from __future__ import annotations

from dataclasses import dataclass

from jubako.errors import ConfigError

WRITES_BORDERS: dict[str, bool] = {
    "BambaForCausalLM": True,
    "FalconH1ForCausalLM": True,
    "GraniteMoeHybridForCausalLM": True,
    "JambaForCausalLM": True,
    "Mamba2ForCausalLM": True,
    "NemotronHForCausalLM": True,
    "Qwen3NextForCausalLM": True,
}
"""Architectures with recurrent layers → all of them can write a state at every block border."""


@dataclass(frozen=True)
class StateCaching:
    """What the options that were left open become."""

    enable_prefix_caching: bool
    mamba_cache_mode: str
    """"none" for a model without recurrent layers."""


def resolve_state_caching(
    architecture: str,
    *,
    enable_prefix_caching: bool | None,
    mamba_cache_mode: str | None,
    enable_chunked_prefill: bool,
) -> StateCaching:
    """Prefix caching and the mode of recurrent layers for a model, from what the user chose.

    None leaves a choice open. ConfigError if the choices contradict each other or the model.
    """
    caching, mode = enable_prefix_caching, mamba_cache_mode
    if architecture not in WRITES_BORDERS:
        if mode not in (None, "none"):
            raise ConfigError(
                f"mamba_cache_mode={mode}, but {architecture} has no recurrent layers; leave it "
                "unset.",
                "mamba_cache_mode",
            )
        return StateCaching(True if caching is None else caching, "none")
    borders = WRITES_BORDERS[architecture]
    if mode == "all" and not borders:
        raise ConfigError(
            f"mamba_cache_mode=all: the layers of {architecture} do not write a state at every "
            "block border; use align.",
            "mamba_cache_mode",
        )
    if mode == "align" and not enable_chunked_prefill:
        raise ConfigError(
            "mamba_cache_mode=align ends prompts' chunks at block borders, which needs "
            "enable_chunked_prefill.",
            "mamba_cache_mode",
        )
    possible = "all" if borders else "align" if enable_chunked_prefill else "none"
    if mode is None:
        mode = "none" if caching is False else possible
    if caching is None:
        caching = mode != "none"
    if caching and mode == "none":
        raise ConfigError(
            "enable_prefix_caching needs the states of recurrent layers; set mamba_cache_mode to "
            f"{'all or align' if borders else 'align (with enable_chunked_prefill)'}, or leave it "
            "unset.",
            "mamba_cache_mode",
        )
    if not caching and mode != "none":
        raise ConfigError(
            f"mamba_cache_mode={mode} keeps states for prefix caching, which is off; leave it "
            "unset, or set enable_prefix_caching.",
            "mamba_cache_mode",
        )
    return StateCaching(caching, mode)
