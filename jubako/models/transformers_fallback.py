"""How does an architecture without a file here run all the same? As transformers' own module.

Only attention is replaced: transformers hands queries, keys and values to a function of ours, which
keeps them in our cache and attends there. What cannot run so is refused before memory is taken,
with the reason. Code that comes with a checkpoint is never run. transformers is imported in this
file alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from jubako.checkpoint.entries import integer_or_none
from jubako.config import JubakoConfig
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.layers.attention import Attention
from jubako.layers.dtype import default_dtype
from jubako.layers.forward_context import set_forward_context
from jubako.layers.weights import WeightTarget, whole_parameter
from jubako.models.checkpoint_layout import CheckpointLayout
from jubako.models.registry import refusal
from jubako.models.traced_attention import (
    MaskRule,
    SubmodulesCalled,
    Trace,
    collecting,
    require_attention_alone,
)
from jubako.models.weights import load_weights

_RUN, _TRACE = "jubako", "jubako-trace"
"""Names of our attention in transformers' registry: in a step, and while a model is looked at."""

_CACHED = "attention_over_cache"
"""The submodule that modules of transformers get, which attends for them."""

_PURE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}

_tracing: ContextVar[Trace | None] = ContextVar("_tracing", default=None)


# -- what transformers calls ------------------------------------------------------------------


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Heads [1, H, T, D] → [1, T, Hq, D]."""
    trace = _tracing.get()
    if trace is not None:
        return trace.attend(module, query, key, value, attention_mask, options), None
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    rows = collecting()
    if rows is not None:
        return rows.attend(q, k, v)[None], None
    out: torch.Tensor = getattr(module, _CACHED)(q, k, v)
    return out.view(1, *q.shape), None


def _mask(*given: Any, mask_function: MaskRule | None = None, **others: Any) -> torch.Tensor:
    del given, others
    trace = _tracing.get()
    assert trace is not None, "masks are made only while a model is looked at"
    return trace.mask(mask_function)


AttentionInterface.register(_RUN, _attend)
AttentionInterface.register(_TRACE, _attend)
# A step needs no mask, so that none is registered for it: transformers then makes none.
AttentionMaskInterface.register(_TRACE, _mask)


# -- the model --------------------------------------------------------------------------------


class TransformersForCausalLM(nn.Module):
    """A causal model of transformers, with its attention over our cache."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        super().__init__()
        model_config = config.model_config
        self.architecture = model_config.architecture
        self.length = model_config.context_length
        with _refusing(self.architecture):
            hf_config = _make_config(self.architecture, model_config.hf_config)
            model_class: type[nn.Module] = getattr(transformers, self.architecture)
            _check(model_class, hf_config)
            trace, decoder, result_type, names = _look_at(model_class, hf_config, self.length)
        with _NoDraws():
            self.model = _build(model_class, hf_config, _RUN)
        _keep_in_float32(self.model, torch.get_default_dtype())
        for name, module in self.model.named_modules():
            if name in names:
                call = trace.calls[names[name]]
                attention = _AttentionOnly(
                    call.num_heads,
                    call.head_size,
                    call.scale,
                    call.num_kv_heads,
                    config=config,
                    layer_name=f"{prefix}{name}.attn",
                    sliding_window=call.sliding_window,
                    logits_soft_cap=call.logits_soft_cap,
                    sink_logits=call.sinks is not None,
                )
                if call.sinks is not None:
                    attention.sinks = module.get_parameter(call.sinks)
                setattr(module, _CACHED, attention)
        self._tensors = _tensors(self.model)
        self._layout = CheckpointLayout(get_model_conversion_mapping(self.model))
        self._aliases = self.model.state_dict().keys() - self._tensors.keys()
        self._takes = {own for own, _ in self.weight_targets("")}
        self._unwanted = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self.embed_tokens = self.model.get_input_embeddings()
        self.decoder = self.model.get_submodule(decoder)
        self.model.set_submodule(decoder, _Given(result_type))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → what `forward` takes as `inputs_embeds`, [T, hidden]."""
        embeddings: torch.Tensor = self.embed_tokens(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids or embeddings of T tokens at `positions` [T] → final hidden states [T, hidden]."""
        given: dict[str, torch.Tensor] = {"position_ids": positions[None]}
        if inputs_embeds is not None:
            given["inputs_embeds"] = inputs_embeds[None]
        else:
            assert input_ids is not None, "a step has ids or embeddings"
            given["input_ids"] = input_ids[None]
        hidden: torch.Tensor = self.decoder(**given, use_cache=False).last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [r, hidden] → logits [r, V], by all that the model does to them."""
        logits: torch.Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from Hugging Face's names; see `models.weights.load_weights`.

        UnsupportedModelError also for a model whose tokens turn out to meet outside attention.
        """
        used = load_weights(self, weights, self.sanitize)
        device = next(iter(self._tensors.values())).device
        vocab = self.embed_tokens.weight.shape[0]
        with _refusing(self.architecture), torch.inference_mode(), set_forward_context(None):
            require_attention_alone(self.forward, vocab, self.length, device)
        return used

    def sanitize(self, name: str) -> str | None:
        """The model's own name of a checkpoint's tensor; None for one that is not wanted."""
        renamed = self._layout.rename(name)
        prefix = f"{self.model.base_model_prefix}."
        candidates = (name, prefix + name, renamed, prefix + renamed)
        for own in candidates:
            if own in self._takes:
                return own
        for own in candidates:
            if own in self._aliases or any(re.search(pattern, own) for pattern in self._unwanted):
                return None
        return name

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """All tensors of the model, by transformers' names."""
        del name
        for own, tensor in self._tensors.items():
            if not isinstance(tensor, nn.Parameter):
                yield own, WeightTarget(tensor, tuple(tensor.shape))
                continue
            parts = dict(self._layout.parts(own, tensor))
            yield own, whole_parameter(tensor, parts=tuple(parts))
            yield from parts.items()


class _AttentionOnly(Attention):
    """Attention whose sinks are a parameter of the module that it attends for."""

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """None of its own."""
        del name
        return iter(())


class _Given(nn.Module):
    """Stands where the decoder was: what the rest of the model gets is what it is given."""

    def __init__(self, result_type: type) -> None:
        super().__init__()
        self.result_type = result_type

    def forward(self, *ignored: Any, inputs_embeds: torch.Tensor, **options: Any) -> Any:
        del ignored, options
        return self.result_type(last_hidden_state=inputs_embeds)


class _NoDraws(TorchFunctionMode):
    """Leaves out drawing random weights, which are all read from the checkpoint."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


_DRAWS = {
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
}


# -- building ---------------------------------------------------------------------------------


def _make_config(architecture: str, entries: Mapping[str, Any]) -> Any:
    """transformers' configuration of a model that it knows as a causal one."""
    known = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known |= {names} if isinstance(names, str) else set(names)
    if architecture not in known or not hasattr(transformers, architecture):
        reason = f"transformers {transformers.__version__} knows no causal model of this name"
        if entries.get("auto_map"):
            reason += ", and code that comes with a checkpoint is never run"
        raise UnsupportedModelError(f"{reason}.")
    own = dict(entries)
    for name in ("quantization_config", "auto_map"):
        own.pop(name, None)
    if own.get("rope_parameters"):
        # Says it all; the older names beside it hold less.
        for name in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
            own.pop(name, None)
    config_class = getattr(transformers, architecture).config_class
    # transformers would begin to build any number of layers.
    layers = "num_hidden_layers"
    for name in (layers, config_class.attribute_map.get(layers, layers)):
        integer_or_none(own, name)
    try:
        return config_class.from_dict(own)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot read config.json as one of {architecture}: {error}"
        ) from None


def _check(model_class: type[nn.Module], hf_config: Any) -> None:
    """Refuse what is known from the class and the configuration alone."""
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it has an encoder and a decoder.")
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError("some of its layers keep a recurrent state.")
    if getattr(hf_config, "alibi", False):
        raise UnsupportedModelError("alibi=true in config.json: it biases scores by distance.")
    types = getattr(hf_config, "layer_types", None) or ()
    for kind in types:
        if kind not in _PURE_LAYER_TYPES:
            raise UnsupportedModelError(f"layers of type {kind!r} are more than attention.")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            "its layers do not hand attention over to transformers' attention interface."
        )
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"rope_type={part['rope_type']} turns keys by the length of what is computed with "
                "them, so that they cannot be cached."
            )


def _build(model_class: type[nn.Module], hf_config: Any, attention: str) -> Any:
    hf_config._attn_implementation = attention
    try:
        return model_class(hf_config).eval().requires_grad_(False)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot build {model_class.__name__} from config.json: {error}"
        ) from None


def _look_at(
    model_class: type[nn.Module], hf_config: Any, length: int
) -> tuple[Trace, str, type, dict[str, int]]:
    """Run a model without memory.

    Returns what its modules ask of attention, the name of the submodule that is all but the head,
    the type of its result, and name → id of each module that attends.
    """
    # Experts multiply in groups, which without memory PyTorch does only in this dtype.
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model = _build(model_class, hf_config, _TRACE)
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                raise UnsupportedModelError(f"{name} is a convolution over tokens.")
        ids = torch.zeros(1, 4, dtype=torch.int64)
        # With a mask of what is no padding, transformers does not read the positions' values.
        given = {"attention_mask": torch.ones_like(ids), "position_ids": torch.zeros_like(ids)}
        called = SubmodulesCalled(model)
        trace = Trace(length)
        token = _tracing.set(trace)
        try:
            model(input_ids=ids, **given, use_cache=False)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"it cannot be run without memory ({type(error).__name__}: {error})."
            ) from None
        finally:
            _tracing.reset(token)
            called.forget()
    if not trace.calls:
        raise UnsupportedModelError("no layer hands attention to transformers' interface.")
    decoders = [(n, out) for n, out in called.direct if hasattr(out, "last_hidden_state")]
    if len(decoders) != 1:
        raise UnsupportedModelError("its head is not apart from the rest.")
    names = {
        name: id(module) for name, module in model.named_modules() if id(module) in trace.calls
    }
    return trace, decoders[0][0], type(decoders[0][1]), names


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Parameters that transformers keeps in float32 whatever the model's dtype."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in _tensors(model).items():
        if kept & set(name.split(".")):
            tensor.data = tensor.data.float()


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a checkpoint has, each once, by name."""
    stored = model.state_dict().keys()
    return {
        name: tensor
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
        if name in stored
    }


@contextmanager
def _refusing(architecture: str) -> Iterator[None]:
    """Give the reasons within the name of what is refused."""
    try:
        yield
    except UnsupportedModelError as error:
        raise refusal(architecture, f"It cannot run through transformers: {error}") from None
