"""What do options that were left open become, once the checkpoint and the machine are known?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from jubako.config import JubakoConfig
from jubako.config.recurrent import resolve_state_caching
from jubako.engine.encoder_setup import with_encoder
from jubako.engine.handshake import Usage
from jubako.engine.pooling_setup import with_pooling
from jubako.errors import CheckpointError, ConfigError
from jubako.utils.cpu import computes_bfloat16, instruction_sets

if TYPE_CHECKING:
    from jubako.checkpoint.info import Checkpoint

logger = logging.getLogger(__name__)

CPU_BLOCK_SIZE = 32
GPU_BLOCK_SIZE = 16

_LARGE_GPU_BYTES = 70 << 30
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_LENGTH_KEYS = (
    "max_position_embeddings",
    "max_target_positions",
    "n_positions",
    "max_sequence_length",
    "seq_length",
)
_NOT_BUILT = {
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "data_parallel_size",
    ),
    "scheduler_config": ("disable_chunked_mm_input",),
    # Nobody would read events, and they would pile up.
    "kv_events_config": ("enable_kv_cache_events", "use_int_block_hashes"),
}
"""Options that schedulers and caches know when they are used alone, and no engine does yet."""


_EXECUTORS_THAT_OVERLAP = (None, "uni", "mp", "external_launcher")
"""Those with which steps overlap unless that is forbidden."""


class Machine(NamedTuple):
    """What the defaults depend on: the device, and what it is good at."""

    device: str
    """"cpu" or "cuda"."""
    bfloat16: bool
    """Whether it multiplies bfloat16 itself."""
    float16: bool
    memory: int = 0
    """Bytes of a GPU; 0 for a CPU."""
    name: str = ""


def complete_config(config: JubakoConfig, checkpoint: Checkpoint, *, usage: Usage) -> JubakoConfig:
    """`config` with everything filled in that follows from the checkpoint, the machine and the use.

    Raises `ConfigError` for options that do not fit them, or that ask for what is not built.
    """
    _refuse_what_is_not_built(config)
    machine = probe_machine(config.device_config.device)
    model = checkpoint.hf_config
    architecture = _architecture(model)
    length_asked_for = config.model_config.max_model_len
    config = with_pooling(config, checkpoint, architecture)
    config = with_encoder(config, checkpoint, architecture)
    max_model_len = resolve_max_model_len(config.model_config.max_model_len, model)
    block_size = config.cache_config.block_size
    caching = resolve_state_caching(
        architecture,
        enable_prefix_caching=config.cache_config.enable_prefix_caching,
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
        enable_chunked_prefill=config.scheduler_config.enable_chunked_prefill,
    )
    memory_given = (
        config.cache_config.num_gpu_blocks_override or config.cache_config.kv_cache_memory_bytes
    )
    may_shorten = length_asked_for is None and not memory_given
    return config.replace(
        model_config={
            "hf_config": model,
            "architecture": architecture,
            "vocab_size": _positive_int(model, "vocab_size"),
            "generation_config": checkpoint.generation_config,
            "eos_token_ids": tuple(checkpoint.eos_token_ids),
            "max_model_len": max_model_len,
            "original_max_model_len": -1 if may_shorten else max_model_len,
            "dtype": resolve_dtype(config.model_config.dtype, checkpoint, machine),
        },
        device_config={"device": machine.device},
        cache_config={
            "block_size": block_size
            or (CPU_BLOCK_SIZE if machine.device == "cpu" else GPU_BLOCK_SIZE),
            "enable_prefix_caching": caching.enable_prefix_caching,
            "mamba_cache_mode": caching.mamba_cache_mode,
        },
        scheduler_config={
            **_scheduler_limits(config, machine, usage, max_model_len),
            "async_scheduling": _plans_ahead(config, machine),
        },
    )


def _refuse_what_is_not_built(config: JubakoConfig) -> None:
    for concern, names in _NOT_BUILT.items():
        part = getattr(config, concern)
        for name in names:
            value, default = getattr(part, name), getattr(type(part), name)
            if value and value != default:
                raise ConfigError(f"{name}={value} is not built; leave it at {default}.", name)


# -- machine ----------------------------------------------------------------------------------


def probe_machine(device: str) -> Machine:
    """The machine that `device` ("auto", "cpu" or "cuda") stands for."""
    if device != "cpu":
        # Asking takes PyTorch; a CPU that was asked for does not.
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
            return Machine("cuda", bfloat16, True, properties.total_memory, properties.name)
        if device == "cuda":
            raise ConfigError("device=cuda, but PyTorch finds no CUDA device.", "device")
    float16 = bool(instruction_sets() & {"avx512_fp16", "amx_fp16", "asimdhp"})
    return Machine("cpu", computes_bfloat16(), float16)


# -- model ------------------------------------------------------------------------------------


def _architecture(model: dict[str, Any]) -> str:
    names = model.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError("config.json names no architecture (field architectures).")
    return names[0]


def _text_part(model: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, where other parts stand beside it."""
    part = model.get("text_config")
    return part if isinstance(part, dict) else model


def _positive_int(model: dict[str, Any], name: str) -> int:
    value = model.get(name, _text_part(model).get(name))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} in config.json must be a positive integer, got {value!r}.")
    return value


def resolve_max_model_len(wanted: int | None, model: dict[str, Any]) -> int:
    """The longest context in tokens: the model's own, or less if less is wanted."""
    names = [n for n in _LENGTH_KEYS if n in model or n in _text_part(model)]
    if not names:
        if wanted is None:
            raise ConfigError(
                "The checkpoint does not say how long its context may be; set max_model_len.",
                "max_model_len",
            )
        return wanted
    limit = _positive_int(model, names[0])
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {limit} tokens that the model was made for "
            f"({names[0]}={limit}); use at most {limit}.",
            "max_model_len",
        )
    return limit if wanted is None else wanted


def resolve_dtype(wanted: str, checkpoint: Checkpoint, machine: Machine) -> str:
    """The name of the dtype to compute in: "float32", "bfloat16" or "float16"."""
    model = checkpoint.hf_config
    # Its activations leave the range of float16.
    no_float16 = "gemma" in str(model.get("model_type", ""))
    if wanted != "auto":
        name = _DTYPE_NAMES.get(wanted, wanted)
        if name == "float16" and no_float16:
            raise ConfigError(
                "dtype=float16 overflows in this model; use bfloat16 or float32.", "dtype"
            )
        return name
    text = _text_part(model)
    named = (part.get(key) for part in (model, text) for key in ("dtype", "torch_dtype"))
    own = str(next(filter(None, named), "bfloat16")).removeprefix("torch.")
    if own == "float32":
        return own
    if own == "float16" and checkpoint.kind != "gguf" and not no_float16:
        return own if machine.float16 else "float32"
    # Files in float16 for llama.cpp are made from bfloat16 as often as not.
    return "bfloat16" if machine.bfloat16 else "float32"


# -- scheduler --------------------------------------------------------------------------------


def _scheduler_limits(
    config: JubakoConfig, machine: Machine, usage: Usage, max_model_len: int
) -> dict[str, int]:
    tokens, seqs = _default_limits(machine, usage)
    scheduler = config.scheduler_config
    wanted_tokens, wanted_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if wanted_tokens is None:
        # A default gives way to what was asked for, in both directions.
        tokens = max(tokens, wanted_seqs or 0)
        if not scheduler.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    else:
        tokens = wanted_tokens
    if not scheduler.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_model_len={max_model_len}, which "
            "needs enable_chunked_prefill.",
            "max_num_batched_tokens",
        )
    return {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": min(seqs, tokens) if wanted_seqs is None else wanted_seqs,
    }


def _plans_ahead(config: JubakoConfig, machine: Machine) -> bool:
    wanted = config.scheduler_config.async_scheduling
    if wanted is not None:
        return wanted
    # On a CPU planning takes cores from the computing that it would hide behind.
    backend = config.parallel_config.distributed_executor_backend
    return machine.device != "cpu" and backend in _EXECUTORS_THAT_OVERLAP


def _default_limits(machine: Machine, usage: Usage) -> tuple[int, int]:
    """Token budget of a step, and how many requests run at once."""
    if machine.device == "cpu":
        return (4096, 256) if usage == "llm" else (2048, 128)
    if machine.memory >= _LARGE_GPU_BYTES and "a100" not in machine.name.lower():
        return (16384, 1024) if usage == "llm" else (8192, 1024)
    return (8192, 256) if usage == "llm" else (2048, 256)
