"""What would transformers answer? Tiny models, prompts, and the verdict on our greedy tokens."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.exactness import rows
from tests.exactness.sizes import SMALL, VOCAB

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

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


_RECURRENT = ("mamba_", "ssm_", "linear_conv_kernel_dim", "conv_kernel", "conv_L_cache")
"""Configurations of models with recurrent layers have an entry that begins so."""


def is_recurrent(name: str) -> bool:
    """Whether architecture `name` has recurrent layers."""
    return any(entry.startswith(_RECURRENT) for entry in CONFIGS[name]().to_dict())


def auto_class(config: Any) -> Any:
    """The class of transformers that makes and loads models of this configuration."""
    if not config.is_encoder_decoder:
        return transformers.AutoModelForCausalLM
    if hasattr(config, "num_mel_bins"):
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def make_model(name: str, folder: Path) -> Any:
    """A random model of architecture `name`, also written as a folder with a tokeniser."""
    torch.manual_seed(sum(name.encode()))
    config = CONFIGS[name]()
    config.dtype = "float32"
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at ones and zeros, and would not show
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for path, buffer in model.named_buffers():
            if path.endswith(("correction_bias", "logits_bias")):  # zeros would not show
                buffer.add_(torch.randn_like(buffer), alpha=0.3)
        rows.prepare(name, model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    """One word a token, so that any id sequence has a text."""
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_prompts(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Token-id prompts of these lengths; two of three share a prefix with others."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(max(lengths))]
    prompts = []
    for index, length in enumerate(lengths):
        common = (length // 2, length - 1, 0)[index % 3]
        prompts.append(shared[:common] + [rng.randrange(3, vocab) for _ in range(length - common)])
    return prompts


class Oracle:
    """Judges tokens by the logits that transformers has before each of them.

    Logits follow the tokens that are judged, so after a tie the rest is judged too. `step_by_step`
    takes them as transformers does when it generates, one token at a time with its cache; else one
    pass over prompt and answer gives all of them, which is the same function and much faster.
    """

    def __init__(self, model: Any, *, step_by_step: bool = False) -> None:
        self.model = model
        self.step_by_step = step_by_step
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def judge(self, prompt: list[int], answer: list[int], what: str = "") -> int:
        """How many tokens of `answer` are others than the best, but tie with it.

        AssertionError for a token that is not the best and does not tie.
        """
        key = (tuple(prompt), tuple(answer))
        if key not in self._known:
            self._known[key] = self._judge(prompt, answer, what)
        return self._known[key]

    def _judge(self, prompt: list[int], answer: list[int], what: str) -> int:
        ties = 0
        for position, logits in enumerate(self._logits(prompt, answer)):
            ours, best = answer[position], int(logits.argmax())
            gap = float(logits[best] - logits[ours])
            assert gap < TIE, (
                f"{what}: of a prompt of {len(prompt)}, token {position} is {ours}, not {best} "
                f"(gap {gap:.2e})"
            )
            ties += ours != best
        return ties

    @torch.inference_mode()
    def _logits(self, prompt: list[int], answer: list[int]) -> Iterator[torch.Tensor]:
        """The logits before each token of `answer`."""
        out = None
        if self.step_by_step:
            out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        if out is None or out.get("cache") is None:  # not every oracle has a cache
            ids = torch.tensor([prompt + answer[:-1]])
            out = self.model(ids, use_cache=False, logits_to_keep=len(answer))
            yield from out.logits[0].float()
            return
        yield out.logits[0, -1].float()
        for position, token in enumerate(answer[:-1], start=len(prompt)):
            # As `generate` does: a cache whose first layer is recurrent does not know positions.
            given = {"position_ids": torch.tensor([[position]])} if self.takes_positions else {}
            ids = torch.tensor([[token]])
            out = self.model(ids, use_cache=True, cache=out.cache, **given)
            yield out.logits[0, -1].float()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int]) -> torch.Tensor:
        """Log-probabilities [P, V] after each token of the prompt, float32."""
        logits = self.model(torch.tensor([prompt]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)
