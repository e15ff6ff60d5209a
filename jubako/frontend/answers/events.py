"""What can a parser find in an answer?

An answer is a sequence of events. Neighbours of one kind may come in any number of pieces; joined,
they are the same however the text was cut.
"""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model thought before it answered."""

    text: str


class Call(NamedTuple):
    """The next tool call begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """JSON of the arguments of the call that began last, or a piece of it."""

    text: str


Event = Content | Reasoning | Call | Arguments
