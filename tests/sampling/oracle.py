"""The sampler's pipeline written down naively, in float64, one row at a time."""

from __future__ import annotations

import numpy as np
import torch

from jubako.config import JubakoConfig
from jubako.sampling.builtin_processors import build_processors
from jubako.sampling.logits_processors import AddedRow, BatchUpdate, LogitsProcessor
from jubako.sampling.metadata import NO_LOGPROBS, SamplingMetadata
from jubako.sampling.noise import gumbel_noise, noise_keys
from jubako.sampling.sampler import Sampler, SamplerOutput
from jubako.sampling_params import SamplingParams

CPU = torch.device("cpu")


class Row:
    """A row of a batch: parameters, prompt, output so far, seed."""

    def __init__(
        self,
        params: SamplingParams | None = None,
        prompt: list[int] | None = None,
        output: list[int] | None = None,
        seed: int = 0,
        **parameters: object,
    ) -> None:
        self.params = params or SamplingParams(**{"temperature": 0.0} | parameters)
        self.prompt = prompt or [0]
        self.output = output or []
        self.seed = seed


def metadata_of(
    rows: list[Row], vocab_size: int, custom: list[type[LogitsProcessor]] | None = None
) -> SamplingMetadata:
    config = JubakoConfig().replace(model_config={"vocab_size": vocab_size})
    processors = build_processors(config, CPU, custom)
    processors.update_state(
        BatchUpdate(
            len(rows),
            [],
            [AddedRow(i, r.params, r.prompt, r.output) for i, r in enumerate(rows)],
        )
    )
    params = [r.params for r in rows]
    temperature = np.array([p.temperature for p in params], dtype=np.float32)
    wanted = [
        NO_LOGPROBS if p.logprobs is None else vocab_size if p.logprobs == -1 else p.logprobs
        for p in params
    ]
    return SamplingMetadata(
        temperature=temperature,
        top_k=np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        seeds=np.array([r.seed % 2**64 for r in rows], dtype=np.uint64),
        num_logprobs=np.array(wanted, dtype=np.int32),
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        no_top_k=True,
        no_top_p=True,
        no_penalties=True,
        max_num_logprobs=None,
        output_token_ids=[r.output for r in rows],
        logitsprocs=processors,
    )


def sample(
    logits: torch.Tensor,
    rows: list[Row],
    only: list[int] | None = None,
    custom: list[type[LogitsProcessor]] | None = None,
) -> SamplerOutput:
    """Run the sampler; `only` names the batch rows that have logits."""
    metadata = metadata_of(rows, logits.shape[1], custom)
    batch_rows = np.arange(len(rows)) if only is None else np.array(only)
    index = np.array([len(r.output) for r in rows])
    return Sampler()(logits.clone(), metadata, batch_rows, index)


def tokens(logits: torch.Tensor, rows: list[Row], only: list[int] | None = None) -> list[int]:
    return sample(logits, rows, only).token_ids.tolist()


def changed_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Logits after the stages that may change the most likely token."""
    x, p = logits.astype(np.float64).copy(), row.params
    if p.allowed_token_ids is not None:
        x[[v for v in range(len(x)) if v not in p.allowed_token_ids]] = -np.inf
    for word in p.bad_words_token_ids or []:
        start = len(word) - 1
        if not start or row.output[-start:] == word[:-1]:
            x[word[-1]] = -np.inf
    if len(row.output) < p.min_tokens:
        x[list(p.all_stop_token_ids)] = -np.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(row.prompt) | set(row.output):
        r = p.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(row.output):
        x[token] -= p.frequency_penalty * row.output.count(token)
        x[token] -= p.presence_penalty
    return x


def filtered_logits(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Logits after temperature, min-p, top-k and top-p, -inf where a token is dropped."""
    x = x / params.temperature
    if params.min_p:
        x = np.where(x < x.max() + np.log(params.min_p), -np.inf, x)
    if 0 < params.top_k < len(x):
        x = np.where(x < np.sort(x)[-params.top_k], -np.inf, x)
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        probabilities = np.exp(x[order] - x.max())
        probabilities /= probabilities.sum()
        before = np.concatenate([[0], probabilities.cumsum()[:-1]])
        dropped = order[before >= params.top_p - 1e-9]
        x = x.copy()
        x[[v for v in dropped if v != order[0]]] = -np.inf
    return x


def expected_token(logits: np.ndarray, row: Row) -> int:
    x = changed_logits(logits, row)
    if row.params.is_greedy:
        return int(x.argmax())
    x = filtered_logits(x, row.params)
    key = noise_keys(np.array([row.seed], dtype=np.uint64), np.array([len(row.output)]))
    noise = gumbel_noise(key, torch.arange(len(x)).unsqueeze(0))[0].numpy()
    return int((x + noise).argmax())
