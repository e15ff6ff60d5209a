"""Where in transformers' modules does a tensor go that a checkpoint names or splits otherwise?

transformers says so in rules: some rename, some put the matrices of single experts together. The
rules are read by their attributes, so that this file does not import transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from jubako.layers.weights import WeightTarget

_STACK, _STACK_AND_JOIN = ["MergeModulelist"], ["MergeModulelist", "Concatenate"]


class CheckpointLayout:
    """The rules of one model. Rules of other kinds than those above are left out."""

    def __init__(self, rules: Iterable[Any]) -> None:
        self._renamings = []
        self._stacks: list[tuple[str, list[str]]] = []
        """Ending of a parameter's name → endings of the tensors in it, with * for the expert."""
        for rule in rules:
            steps = getattr(rule, "operations", None)
            if not steps:
                self._renamings.append(rule)
            elif _stacks_experts(steps) and len(rule.target_patterns) == 1:
                sources = [_plain(pattern) for pattern in rule.source_patterns]
                self._stacks.append((_plain(rule.target_patterns[0]), sources))

    def rename(self, name: str) -> str:
        """The name of a checkpoint's tensor after all rules that rename."""
        for rule in self._renamings:
            name = rule.rename_source_key(name)[0]
        return name

    def parts(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, WeightTarget]]:
        """The tensors, one or more an expert, that a checkpoint may have in place of `parameter`.

        `parameter` is [experts, rows, columns]; what an expert has several of are its rows.
        """
        for ending, sources in self._stacks:
            if not name.endswith(ending) or parameter.dim() < 2:
                continue
            stem = name.removesuffix(ending)
            for expert in range(parameter.shape[0]):
                views = parameter.data[expert].chunk(len(sources))
                for source, view in zip(sources, views):
                    yield (
                        stem + source.replace("*", str(expert)),
                        WeightTarget(view, tuple(view.shape)),
                    )


def _stacks_experts(steps: list[Any]) -> bool:
    kinds = [type(step).__name__ for step in steps]
    if kinds not in (_STACK, _STACK_AND_JOIN):
        return False
    return [step.dim for step in steps] == [0, 1][: len(steps)]


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "").removeprefix("^").removesuffix("$")
