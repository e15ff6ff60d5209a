"""Which responses can be asked for again, and gone on with?"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from jubako.entrypoints.server.errors import ServerError
from jubako.entrypoints.server.responses_protocol import ResponseObject

MAX_RESPONSES = 1000
MAX_CHARACTERS = 64 * 1024 * 1024


@dataclass
class StoredResponse:
    """A response, the conversation that it ends, and the work on it while it goes on."""

    response: ResponseObject
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Without instructions, which belong to one turn."""
    characters: int = 0
    work: asyncio.Task[None] | None = None


class ResponseStore:
    """The latest responses, in memory; the oldest go when there are too many or they are too long.

    Those that are still being worked on stay.
    """

    def __init__(
        self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._characters = 0

    def put(self, stored: StoredResponse) -> None:
        """Keep `stored`, in the place of what was there under its id."""
        self._forget(stored.response.id)
        stored.characters = sum(len(str(message)) for message in stored.messages)
        self._stored[stored.response.id] = stored
        self._characters += stored.characters
        for id, old in list(self._stored.items()):
            fits = self._characters <= self._max_characters
            if fits and len(self._stored) <= self._max_responses:
                return
            if old.work is None:
                self._forget(id)

    def get(self, id: str) -> StoredResponse:
        """The response of that id; raises `not_found`."""
        stored = self._stored.get(id)
        if stored is None:
            raise ServerError(
                "not_found",
                "There is no response of this id; it was not stored, or was forgotten since.",
                "response_id",
            )
        return stored

    def delete(self, id: str) -> None:
        """Forget a response, and stop the work on it."""
        work = self.get(id).work
        if work is not None:
            work.cancel()
        self._forget(id)

    def _forget(self, id: str) -> None:
        stored = self._stored.pop(id, None)
        if stored is not None:
            self._characters -= stored.characters

    def __len__(self) -> int:
        return len(self._stored)
