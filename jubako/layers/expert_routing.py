"""Which experts does a token go to, and how much does each count?

Every function takes router logits [T, E] float32 and returns weights [T, k] float32 and expert
numbers [T, k] int64, no number twice for a token.
"""

from __future__ import annotations

import math

import torch

Routing = tuple[torch.Tensor, torch.Tensor]


def softmax_top_k_in_groups(
    logits: torch.Tensor, k: int, *, groups: int, chosen_groups: int, factor: float
) -> Routing:
    """The k best probabilities among the experts of the best groups, times `factor`.

    Experts form `groups` of consecutive ones; a group counts as much as its best expert. One group
    means no restriction (DeepSeek-AI 2024, arXiv 2405.04434, section 2.2).
    """
    scores = logits.softmax(-1)
    choice = scores
    if chosen_groups < groups:
        best = scores.unflatten(-1, (groups, -1)).amax(-1)
        choice = _only_best_groups(scores, best, chosen_groups)
    ids = choice.topk(k, dim=-1, sorted=False).indices
    return scores.gather(-1, ids).mul_(factor), ids


def biased_sigmoid_top_k_in_groups(
    logits: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor,
    groups: int,
    chosen_groups: int,
    normalise: bool,
    factor: float,
) -> Routing:
    """The k best of `sigmoid(logits) + bias` among the experts of the best groups.

    A group counts as much as its best two experts together. `bias` [E] float32 decides who is
    chosen, but the weights are the sigmoids alone: made to sum to 1 if `normalise`, then times
    `factor` (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).
    """
    scores = logits.sigmoid()
    choice = scores + bias
    if chosen_groups < groups:
        grouped = choice.unflatten(-1, (groups, -1))
        best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        choice = _only_best_groups(choice, best_two, chosen_groups)
    ids = choice.topk(k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if normalise:
        # All sigmoids may underflow.
        weights /= weights.sum(-1, keepdim=True).add_(1e-20)
    return weights.mul_(factor), ids


def _only_best_groups(choice: torch.Tensor, group_scores: torch.Tensor, count: int) -> torch.Tensor:
    """`choice` [T, E] with -inf outside of the `count` best of the groups [T, G]."""
    best = group_scores.topk(count, dim=-1, sorted=False).indices
    out_of_reach = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return (
        choice.unflatten(-1, (group_scores.shape[-1], -1))
        .masked_fill(out_of_reach[..., None], -math.inf)
        .flatten(-2)
    )
