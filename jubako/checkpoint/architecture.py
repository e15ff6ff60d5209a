"""What is a model for, going by the name of its architecture?"""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["generate", "embed", "classify", "token_classify", "reward", "process_reward"]

ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert")
"""Stems of architectures in which every token sees the whole text."""

_ROLES: tuple[tuple[str, Role], ...] = (
    ("LMHeadModel", "generate"),
    ("ForCausalLM", "generate"),
    ("ForConditionalGeneration", "generate"),
    ("ForSequenceClassification", "classify"),
    ("ForTokenClassification", "token_classify"),
    ("ForProcessRewardModel", "process_reward"),
    ("ForRewardModel", "reward"),
    ("ForMaskedLM", "embed"),
    ("TextModel", "embed"),
    ("Model", "embed"),
)


class Architecture(NamedTuple):
    """An architecture's name, taken apart."""

    name: str
    """As in config.json."""
    stem: str
    """The family, for example "Llama"."""
    role: Role

    @property
    def is_encoder(self) -> bool:
        """Whether every token sees the whole text."""
        return self.stem in ENCODERS

    @property
    def causal(self) -> str:
        """The architecture of the same decoder that writes text."""
        if self.role == "generate":
            return self.name
        # The text part of Gemma 3 alone is called so only where it does not write.
        return f"{self.stem.removesuffix('Text')}ForCausalLM"


def take_apart(name: str) -> Architecture:
    """The parts of an architecture's name; one of no known ending writes text."""
    for ending, role in _ROLES:
        if name.endswith(ending):
            return Architecture(name, name.removesuffix(ending), role)
    return Architecture(name, name, "generate")
