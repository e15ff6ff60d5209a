"""What should a Llama with sink tokens compute? Written densely: one pass over the whole text.

There is no such model in transformers. This one registers itself there, so that it can be the
oracle of a row like any other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class LlamaSinkConfig(LlamaConfig):
    """A Llama, and how many sink tokens each layer has."""

    model_type = "llama_sink"
    sink_len: int = 32


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(
            x.dtype
        ) * self.weight


class Attention(nn.Module):
    """Rotated keys behind `sink_len` keys that are not; every query sees all of the latter."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.sink_key = nn.Parameter(torch.empty(config.sink_len, self.kv_heads, self.size))
        self.sink_value = nn.Parameter(torch.empty(config.sink_len, self.kv_heads, self.size))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.size // 2
        turns = self.theta ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None, None] * turns
        first, second = x.float().split(half, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, sinks = len(x), len(self.sink_key)
        q = self.rotated(self.q_proj(x).view(length, self.heads, self.size))
        k = self.rotated(self.k_proj(x).view(length, self.kv_heads, self.size))
        v = self.v_proj(x).view(length, self.kv_heads, self.size)
        group = self.heads // self.kv_heads
        k = torch.cat((self.sink_key, k)).repeat_interleave(group, 1)
        v = torch.cat((self.sink_value, v)).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * self.size**-0.5
        visible = torch.ones(length, sinks + length, dtype=torch.bool).tril(sinks)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(v.dtype)
        return self.o_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class LlamaSinkForCausalLM(PreTrainedModel):
    """One text at a time. What it calls a cache is all ids so far."""

    config_class = LlamaSinkConfig
    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                sink = name in ("sink_key", "sink_value")
                nn.init.normal_(parameter, std=1.0 if sink else self.config.initializer_range)

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: torch.Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> Any:
        ids = input_ids if cache is None else torch.cat((cache, input_ids), dim=1)
        x = self.model.embed_tokens(ids[0])
        for layer in self.model.layers:
            x = layer(x)
        logits = self.lm_head(self.model.norm(x[-logits_to_keep:]))
        out: Any = CausalLMOutputWithPast(logits=logits[None])
        out.cache = ids if use_cache else None
        return out


AutoConfig.register(LlamaSinkConfig.model_type, LlamaSinkConfig)
AutoModelForCausalLM.register(LlamaSinkConfig, LlamaSinkForCausalLM)
