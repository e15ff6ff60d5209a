"""What would transformers answer? Tiny models, prompts, and greedy tokens with their gaps."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.exactness import rows
from tests.exactness.sizes import SMALL, VOCAB

TIE = 1e-4
"""Two logits closer than this are a tie: float32 sums taken in another order may swap them."""

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_hidden_layers=3),
    "llama3-rope": lambda: transformers.LlamaConfig(
        **SMALL,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(
        **SMALL, num_hidden_layers=3, head_dim=16, sliding_window=100
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, num_hidden_layers=3),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **SMALL,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=72,
        max_window_layers=2,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, num_hidden_layers=3, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL,
        tie_word_embeddings=False,  # a tied random model only repeats its last token
        num_hidden_layers=7,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=80,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    ),
}
CONFIGS |= rows.collect()
"""Name of a tiny architecture → how its configuration is made."""


def make_model(name: str, folder: Path) -> Path:
    """Write a random model of architecture `name`, with a tokeniser, as a Hugging Face folder."""
    torch.manual_seed(sum(name.encode()))
    config = CONFIGS[name]()
    config.dtype = "float32"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at ones and zeros, and would not show
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One word a token, so that any id sequence has a text."""
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_prompts(count: int, shortest: int, longest: int, vocab: int, seed: int) -> list[list[int]]:
    """Token-id prompts of lengths spread from `shortest` to `longest`, some sharing a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(longest)]
    prompts = []
    for index in range(count):
        length = shortest + (longest - shortest) * index // max(1, count - 1)
        common = rng.choice([0, length // 2, length - 1]) if index % 3 else 0
        own = [rng.randrange(3, vocab) for _ in range(length - common)]
        prompts.append(shared[:common] + own)
    rng.shuffle(prompts)
    return prompts


@dataclasses.dataclass
class Answer:
    """Greedy tokens, and per position the gap between the best two logits."""

    token_ids: list[int]
    gaps: list[float]


def greedy(model: Any, prompt: list[int], max_tokens: int) -> Answer:
    """What `model` (transformers, float32) answers to `prompt`, end of sequence ignored."""
    ids = torch.tensor([prompt])
    answer = Answer([], [])
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        for _ in range(max_tokens):
            out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            best = out.logits[0, -1].float().topk(2)
            answer.token_ids.append(int(best.indices[0]))
            answer.gaps.append(float(best.values[0] - best.values[1]))
            ids = best.indices[:1].view(1, 1)
    return answer


def assert_same(got: list[int], want: Answer, what: str) -> None:
    """`got` equals the oracle's tokens, or first differs where the best two logits tie."""
    assert len(got) == len(want.token_ids), f"{what}: {len(got)} tokens"
    for position, (ours, theirs) in enumerate(zip(got, want.token_ids, strict=True)):
        if ours != theirs:
            gap = want.gaps[position]
            assert gap < TIE, f"{what}: token {position} is {ours}, not {theirs} (gap {gap:.2e})"
            return
