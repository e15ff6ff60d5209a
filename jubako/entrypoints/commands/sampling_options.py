"""Which flags say how to sample, and how do they become sampling parameters?

Names, types and limits are those of `SamplingParams`; here are only the flags' help texts. A flag
that is not given leaves the choice to the model's generation config.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from jubako.entrypoints.default_sampling import default_sampling_values
from jubako.sampling_params import RequestOutputKind, SamplingParams

_DEST = "sampling_"
"""Before the names of the parsed values; the engine has options of the same name."""

_NUMBERS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "Most tokens to generate."),
    "min_tokens": (int, "Fewest tokens to generate."),
    "temperature": (float, "Randomness; 0 always takes the likeliest token."),
    "top_p": (float, "Sample from the likeliest tokens that make up this much probability."),
    "top_k": (int, "Sample from this many of the likeliest tokens; 0: all."),
    "min_p": (float, "Leave out tokens less likely than this share of the best one."),
    "seed": (int, "Seed of this request; the same seed gives the same answer."),
    "presence_penalty": (float, "Lower tokens that occurred in the answer, -2 to 2."),
    "frequency_penalty": (float, "Lower tokens by how often they occurred, -2 to 2."),
    "repetition_penalty": (float, "Divide tokens that occurred by this; 1 changes nothing."),
    "n": (int, "Answers to each prompt."),
    "logprobs": (int, "Show this many logprobs at each position (with --json)."),
    "prompt_logprobs": (int, "The same for the prompt (with --json)."),
}

_SWITCHES = {
    "ignore_eos": "Go on after the end-of-sequence token.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}

_LISTS: dict[str, tuple[type, str]] = {
    "stop": (str, "End at this text. May be given several times."),
    "stop_token_ids": (int, "End at this token id. May be given several times."),
}


def add_sampling_arguments(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """One flag for each parameter that is not in `skip`."""
    group = parser.add_argument_group("sampling", "Unset, the model's own settings hold.")

    def flag(name: str) -> str:
        return "--" + name.replace("_", "-")

    for name, (kind, text) in _NUMBERS.items():
        if name not in skip:
            metavar = "N" if kind is int else "X"
            group.add_argument(flag(name), dest=_DEST + name, type=kind, metavar=metavar, help=text)
    for name, text in _SWITCHES.items():
        if name not in skip:
            group.add_argument(
                flag(name), dest=_DEST + name, action=argparse.BooleanOptionalAction, help=text
            )
    for name, (kind, text) in _LISTS.items():
        if name not in skip:
            group.add_argument(
                flag(name),
                dest=_DEST + name,
                type=kind,
                action="append",
                metavar="TEXT" if kind is str else "ID",
                help=text,
            )


def given_sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given as flags; raises `ValidationError` for a bad one."""
    names = (*_NUMBERS, *_SWITCHES, *_LISTS)
    values = {name: getattr(args, _DEST + name, None) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    # The model's settings cannot make a value good, so a bad one is said before it is loaded.
    SamplingParams(**({"max_tokens": None} | given))
    return given


def sampling_params(
    given: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    output_kind: RequestOutputKind,
    max_tokens: int | None,
) -> SamplingParams:
    """The flags, then the model's settings, then `max_tokens` and neutral values."""
    values = {"max_tokens": max_tokens, **default_sampling_values(generation_config), **given}
    return SamplingParams(**values, output_kind=output_kind)
