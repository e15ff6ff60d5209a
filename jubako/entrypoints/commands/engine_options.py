"""Which flags does every command have that runs a model, and how do they become a config?"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

from jubako.config import ENGINE_CONCERNS, JubakoConfig
from jubako.config.options import add_arguments

LOG_LEVEL_VARIABLE = "JUBAKO_LOG_LEVEL"


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, quiet: bool, skip: Iterable[str] = ()
) -> None:
    """Flags of the engine. `quiet` commands log warnings only, unless told otherwise."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of options, by the names of their flags; flags and variables go before it.",
    )
    add_arguments(parser, ENGINE_CONCERNS, skip=skip)
    if quiet and LOG_LEVEL_VARIABLE not in os.environ:
        parser.set_defaults(log_level="warning")


def engine_config(args: argparse.Namespace) -> JubakoConfig:
    """The configuration that the parsed flags ask for."""
    import dataclasses

    names = {f.name for concern in ENGINE_CONCERNS for f in dataclasses.fields(concern)}
    return JubakoConfig.from_options({k: v for k, v in vars(args).items() if k in names})
