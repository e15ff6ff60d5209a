"""From hidden states to vectors and scores, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jubako.config import PoolerConfig
from jubako.sampling.pooler import Pooler
from jubako.sampling.pooling_metadata import PoolingCursor, PoolingMetadata, PoolingStates
from jubako.sampling_params import PoolingParams

SIZE = 6


class Rows:
    """Requests whose prompts are computed in steps of any sizes."""

    def __init__(self, lengths: list[int], params: list[PoolingParams]) -> None:
        self.hidden = [torch.randn(n, SIZE) for n in lengths]
        self.ids = [list(range(100, 100 + n)) for n in lengths]
        self.params = params
        self.states = [PoolingStates() for _ in lengths]
        self.computed = np.zeros(len(lengths), dtype=np.int64)

    def step(self, pooler: Pooler, counts: list[int]) -> list[Any]:
        parts = [
            hidden[done : done + count]
            for hidden, done, count in zip(self.hidden, self.computed.tolist(), counts)
        ]
        ends = np.cumsum(counts)
        metadata = PoolingMetadata(
            prompt_lens=np.array([len(h) for h in self.hidden]),
            prompt_token_ids=self.ids,
            pooling_params=self.params,
            pooling_states=self.states,
            cursor=PoolingCursor(ends - counts, ends, self.computed.copy()),
        )
        self.computed += counts
        # The step's own tensor, which the next one overwrites.
        buffer = torch.cat(parts)
        outputs = pooler(buffer, metadata)
        buffer.fill_(float("nan"))
        return outputs


def pooler_of(pooling_type: str, compute_scores: Any = None, **fields: Any) -> Pooler:
    fields = {"normalize_embeddings": False, **fields}
    return Pooler(PoolerConfig(pooling_type=pooling_type, **fields), compute_scores)  # type: ignore[arg-type]


def embeds(count: int, **fields: Any) -> list[PoolingParams]:
    return [PoolingParams(task="embed", **fields) for _ in range(count)]


@pytest.mark.parametrize(
    ("pooling_type", "rule"),
    [("LAST", lambda h: h[-1]), ("CLS", lambda h: h[0]), ("MEAN", lambda h: h.mean(0))],
)
def test_a_vector_is_pooled_from_its_own_tokens(pooling_type, rule):
    rows = Rows([3, 1, 5], embeds(3))
    outputs = rows.step(pooler_of(pooling_type), [3, 1, 5])
    for hidden, output in zip(rows.hidden, outputs, strict=True):
        assert output.dtype == np.float32
        assert np.allclose(output, rule(hidden).numpy(), atol=1e-6)


def test_an_unfinished_prompt_has_no_output():
    rows = Rows([4, 2], embeds(2))
    pooler = pooler_of("LAST")
    first = rows.step(pooler, [3, 2])
    assert first[0] is None
    assert np.allclose(first[1], rows.hidden[1][-1])
    assert np.allclose(rows.step(pooler, [1, 0])[0], rows.hidden[0][-1])


def test_chunks_of_all_tokens_are_kept_and_may_be_computed_again():
    rows = Rows([7, 2], [PoolingParams(task="token_embed")] * 2)
    pooler = pooler_of("ALL")
    assert rows.step(pooler, [3, 1]) == [None, None]
    # The first row is preempted: it begins again, in other chunks.
    rows.computed[0] = 0
    second = rows.step(pooler, [5, 1])
    assert second[0] is None
    assert np.allclose(second[1], rows.hidden[1])
    # Its beginning is found in the cache this time.
    rows.computed[0] = 4
    third = rows.step(pooler, [3, 0])
    assert np.allclose(third[0], rows.hidden[0])


def test_means_are_summed_in_float32():
    pooler = pooler_of("MEAN")
    rows = Rows([3000], embeds(1))
    rows.hidden = [torch.full((3000, SIZE), 1.0078125, dtype=torch.bfloat16)]
    (output,) = rows.step(pooler, [3000])
    assert np.allclose(output, 1.0078125, rtol=1e-6)


def test_normalisation_follows_the_cut_and_the_request_has_the_last_word():
    pooler = pooler_of("LAST", normalize_embeddings=True)
    params = [
        PoolingParams(task="embed", dimensions=2),
        PoolingParams(task="embed", use_activation=False),
        PoolingParams(task="embed"),
    ]
    rows = Rows([2, 2, 2], params)
    cut, raw, whole = rows.step(pooler, [2, 2, 2])
    assert np.allclose(cut, F.normalize(rows.hidden[0][-1, :2], dim=0))
    assert np.allclose(raw, rows.hidden[1][-1])
    assert np.allclose(whole, F.normalize(rows.hidden[2][-1], dim=0))


@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softmax", "tanh"])
def test_scores_are_activated_unless_the_request_says_no(activation):
    weight = torch.randn(3, SIZE)
    pooler = pooler_of("LAST", lambda x: x @ weight.T, num_labels=3, activation=activation)
    params = [PoolingParams(task="classify", use_activation=use) for use in (None, False)]
    rows = Rows([2, 3], params)
    activated, raw = rows.step(pooler, [2, 3])
    logits = [weight @ hidden[-1] for hidden in rows.hidden]
    rules = {
        "identity": lambda x: x,
        "sigmoid": torch.sigmoid,
        "softmax": lambda x: x.softmax(-1),
        "tanh": torch.tanh,
    }
    assert np.allclose(activated, rules[activation](logits[0]), atol=1e-6)
    assert np.allclose(raw, logits[1], atol=1e-6)


def test_steps_are_the_tokens_of_the_tag_and_scores_can_be_chosen():
    weight = torch.randn(4, SIZE)
    pooler = pooler_of("STEP", lambda x: x @ weight.T, num_labels=4, step_tag_id=101)
    chosen = PoolingParams(task="token_classify", step_tag_id=102, returned_token_ids=[3, 0])
    rows = Rows([4, 5], [PoolingParams(task="token_classify"), chosen])
    rows.ids = [[101, 7, 101, 7], [102, 9, 9, 9, 102]]
    of_model, of_request = rows.step(pooler, [4, 5])
    assert np.allclose(of_model, (rows.hidden[0] @ weight.T)[[0, 2]], atol=1e-6)
    assert np.allclose(of_request, (rows.hidden[1] @ weight.T)[[0, 4]][:, [3, 0]], atol=1e-6)


def test_tasks_of_both_kinds_share_a_step():
    params = [PoolingParams(task="token_embed"), PoolingParams(task="embed")]
    rows = Rows([3, 2], params)
    every, one = rows.step(pooler_of("LAST"), [3, 2])
    assert np.allclose(every, rows.hidden[0])
    assert np.allclose(one, rows.hidden[1][-1])
