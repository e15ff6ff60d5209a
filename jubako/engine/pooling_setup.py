"""Does a model pool instead of writing text, how, and what does that rule out?

An architecture that ends in `Model` or `ForSequenceClassification`, or a folder of
sentence-transformers, makes a pooling model; any decoder does where `runner=pooling` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jubako.checkpoint.architecture import Architecture, take_apart
from jubako.checkpoint.sentence_transformers import SentenceModules, read_modules
from jubako.config import JubakoConfig
from jubako.config.pooler import WHOLE_PROMPT_TYPES
from jubako.errors import CheckpointError, ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from jubako.checkpoint.info import Checkpoint

_ACTIVATIONS = ("identity", "sigmoid", "softmax", "tanh")
_OF_PROBLEM = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def with_pooling(config: JubakoConfig, checkpoint: Checkpoint, architecture: str) -> JubakoConfig:
    """`config` with runner, tasks and pooling filled in, and without what pooling rules out.

    Raises `ConfigError` for options that ask for what is ruled out, `UnsupportedModelError` for a
    checkpoint that pools in a way that is not built.
    """
    parts = take_apart(architecture)
    runner = config.model_config.runner
    modules = None
    if parts.role in ("generate", "embed") and runner != "generate":
        modules = read_modules(checkpoint.folder)
    pools = parts.role != "generate" or modules is not None or runner == "pooling"
    if not pools:
        _refuse_pooling_options(config)
        return config.replace(model_config={"runner": "generate"})
    if runner == "generate":
        raise ConfigError(
            f"runner=generate does not suit {architecture}, which writes no text; leave it out.",
            "runner",
        )
    if config.scheduler_config.async_scheduling:
        raise ConfigError(
            "async_scheduling=True plans ahead of tokens, and a model that pools makes none; leave "
            "it out.",
            "async_scheduling",
        )
    hf_config = checkpoint.hf_config
    _check_attention(parts, hf_config)
    pooling = _pooling(config, parts, hf_config, modules)
    config = config.replace(
        model_config={
            "runner": "pooling",
            "supported_tasks": _tasks(parts, pooling),
            "max_model_len": _length(config, parts, hf_config, modules),
        },
        pooler_config=pooling,
        scheduler_config={"async_scheduling": False},
    )
    if parts.is_encoder or pooling["pooling_type"] in WHOLE_PROMPT_TYPES:
        config = _whole_prompts(config, architecture)
    return config


def position_offset(architecture: str, hf_config: Mapping[str, Any]) -> int:
    """Entries of the position table before the one of the first token (RoBERTa has some)."""
    if take_apart(architecture).stem not in ("Roberta", "XLMRoberta", "Camembert"):
        return 0
    pad = hf_config.get("pad_token_id")
    return (pad if isinstance(pad, int) else 1) + 1


def _refuse_pooling_options(config: JubakoConfig) -> None:
    for name in ("pooling_type", "normalize_embeddings", "is_matryoshka"):
        if getattr(config.pooler_config, name) is not None:
            raise ConfigError(
                f"{name} is for models that pool, and this one writes text; leave it out, or set "
                "runner=pooling.",
                name,
            )


def _check_attention(parts: Architecture, hf_config: Mapping[str, Any]) -> None:
    if parts.is_encoder:
        refused: dict[str, tuple[Any, ...]] = {
            "is_decoder": (True,),
            "add_cross_attention": (True,),
        }
    else:
        refused = {"is_causal": (False,), "use_bidirectional_attention": (True, "all")}
    for name, values in refused.items():
        given = hf_config.get(name)
        if any(type(given) is type(value) and given == value for value in values):
            raise UnsupportedModelError(
                f"config.json has {name}={given!r}, which is not built for {parts.name}."
            )


# -- what is made of the hidden states --------------------------------------------------------


def _pooling(
    config: JubakoConfig,
    parts: Architecture,
    hf_config: Mapping[str, Any],
    modules: SentenceModules | None,
) -> dict[str, Any]:
    """Fields of `PoolerConfig`."""
    wanted = config.pooler_config
    pooling_type = wanted.pooling_type or _pooling_type(parts, modules)
    normalize = wanted.normalize_embeddings
    if normalize is None:
        normalize = modules is None or modules.normalize
    fields: dict[str, Any] = {
        "pooling_type": pooling_type,
        "is_encoder": parts.is_encoder,
        "embedding_size": _embedding_size(hf_config),
        "lower_case": modules is not None and modules.lower_case,
    }
    if parts.role in ("generate", "embed"):
        if pooling_type == "STEP":
            raise ConfigError("pooling_type=STEP needs a process reward model.", "pooling_type")
        return (
            fields
            | _matryoshka(wanted.is_matryoshka, hf_config, fields["embedding_size"])
            | {"normalize_embeddings": normalize}
        )
    labels = _labels(parts, hf_config)
    return fields | {
        "normalize_embeddings": False,
        "is_matryoshka": False,
        "num_labels": labels if isinstance(labels, int) else len(labels),
        "labels": () if isinstance(labels, int) else labels,
        "activation": _activation(parts, hf_config, labels),
    }


def _pooling_type(parts: Architecture, modules: SentenceModules | None) -> str:
    if modules is not None:
        return modules.pooling_type
    if parts.role == "process_reward":
        return "STEP"
    if parts.role in ("token_classify", "reward"):
        return "ALL"
    return "CLS" if parts.is_encoder else "LAST"


def _embedding_size(hf_config: Mapping[str, Any]) -> int:
    text = hf_config.get("text_config")
    places = [hf_config, text if isinstance(text, Mapping) else {}]
    sizes = [place.get(name) for place in places for name in ("hidden_size", "dim")]
    found = [s for s in sizes if isinstance(s, int) and not isinstance(s, bool) and s > 0]
    if not found:
        raise CheckpointError("config.json has no hidden_size.")
    return found[0]


def _matryoshka(
    wanted: bool | None, hf_config: Mapping[str, Any], embedding_size: int
) -> dict[str, Any]:
    sizes = hf_config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(type(s) is int and s > 0 for s in sizes):
        raise CheckpointError(
            "matryoshka_dimensions in config.json must be a list of positive integers."
        )
    known = bool(sizes or hf_config.get("is_matryoshka"))
    return {
        "is_matryoshka": known if wanted is None else wanted,
        "matryoshka_dimensions": tuple(s for s in sizes if s <= embedding_size),
    }


def _labels(parts: Architecture, hf_config: Mapping[str, Any]) -> tuple[str, ...] | int:
    """The labels' names, or their number."""
    names = hf_config.get("id2label")
    if isinstance(names, dict) and names and parts.role != "reward":
        try:
            ordered = sorted(names.items(), key=lambda item: int(item[0]))
        except (ValueError, TypeError):
            raise CheckpointError("id2label in config.json must be named by numbers.") from None
        return tuple(str(name) for _, name in ordered)
    default = 1 if parts.role == "reward" else 2
    number = hf_config.get("num_labels", default) if parts.role != "reward" else 1
    if type(number) is not int or number < 1:
        raise CheckpointError(
            f"num_labels in config.json must be a positive integer, got {number!r}."
        )
    return number


def _activation(
    parts: Architecture, hf_config: Mapping[str, Any], labels: tuple[str, ...] | int
) -> str:
    """The name of what follows a classifier's logits.

    Cross encoders of sentence-transformers name a class of torch; elsewhere it follows from the
    problem.
    """
    if parts.role == "reward":
        return "identity"
    part = hf_config.get("sentence_transformers")
    named = part.get("activation_fn") if isinstance(part, Mapping) else None
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if named is not None:
        name = str(named).rpartition(".")[2].lower()
        if name not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"The model's activation {named!r} is not supported; known are "
                f"{', '.join(_ACTIVATIONS)}."
            )
        return name
    problem = hf_config.get("problem_type")
    if problem is not None:
        if problem not in _OF_PROBLEM:
            raise CheckpointError(f"problem_type in config.json is {problem!r}, which is unknown.")
        return _OF_PROBLEM[problem]
    count = labels if isinstance(labels, int) else len(labels)
    return "sigmoid" if count == 1 else "softmax"


def _tasks(parts: Architecture, pooling: Mapping[str, Any]) -> tuple[str, ...]:
    by_token = pooling["pooling_type"] in ("ALL", "STEP")
    if parts.role in ("generate", "embed"):
        return ("token_embed",) if by_token else ("embed", "token_embed")
    if by_token:
        return ("token_classify",)
    tasks = ["classify"]
    if not parts.is_encoder:
        tasks.append("token_classify")
    if pooling["num_labels"] == 1:
        tasks.append("score")
    return tuple(tasks)


# -- what that means for the engine -----------------------------------------------------------


def _length(
    config: JubakoConfig,
    parts: Architecture,
    hf_config: Mapping[str, Any],
    modules: SentenceModules | None,
) -> int | None:
    """The longest prompt that is asked for; None where nobody says."""
    wanted = config.model_config.max_model_len
    table = hf_config.get("max_position_embeddings")
    limit = None
    if isinstance(table, int):
        limit = table - position_offset(parts.name, hf_config)
        if wanted is not None and wanted > limit:
            raise ConfigError(
                f"max_model_len={wanted} is more than the {limit} positions that the model has; "
                f"use at most {limit}.",
                "max_model_len",
            )
    if wanted is not None:
        return wanted
    lengths = [modules.max_seq_length if modules is not None else None, limit]
    return min((length for length in lengths if length is not None), default=None)


def _whole_prompts(config: JubakoConfig, architecture: str) -> JubakoConfig:
    """Every prompt is computed in one step, since no part of it can be left out or kept."""
    pooling_type = config.pooler_config.pooling_type
    reason = f"pooling_type={pooling_type}"
    if config.pooler_config.is_encoder:
        reason = f"{architecture}, in which every token sees the whole prompt"
    if config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching=True is not possible with {reason}; leave it out.",
            "enable_prefix_caching",
        )
    length, budget = (
        config.model_config.max_model_len,
        config.scheduler_config.max_num_batched_tokens,
    )
    if length is not None and budget is not None and budget < length:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={length}, and with "
            f"{reason} a prompt cannot be computed in parts; raise the one or lower the other.",
            "max_num_batched_tokens",
        )
    return config.replace(
        cache_config={"enable_prefix_caching": False},
        scheduler_config={"enable_chunked_prefill": False, "long_prefill_token_threshold": 0},
    )
