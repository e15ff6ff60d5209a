"""How do the parts of an answer become items of a response, and the events that tell of them?"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from copy import deepcopy

from jubako.entrypoints.server.responses_protocol import (
    FunctionCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    Status,
)
from jubako.frontend.answers.events import Arguments, Call, Content, Event, Reasoning


class OutputItems:
    """Items that begin, grow and end; `items` holds them as far as they have come."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.items: list[Item] = []
        self._new_call_id = new_call_id
        self._open = False

    def add(self, found: Event) -> list[ResponseEvent]:
        """The events for what was found next."""
        match found:
            case Content(text):
                return [*self._begin_unless(MessageItem, _message), *self._grow(text)]
            case Reasoning(text):
                return [*self._begin_unless(ReasoningItem, _reasoning), *self._grow(text)]
            case Call(name):
                call = FunctionCallItem(
                    id=_new_id("fc"),
                    status="in_progress",
                    call_id=self._new_call_id(),
                    name=name,
                    arguments="",
                )
                return [*self.end(), *self._begin(call)]
            case Arguments(text):
                return self._grow(text)

    def _begin_unless(self, kind: type, new: Callable[[], Item]) -> list[ResponseEvent]:
        if self._open and isinstance(self.items[-1], kind):
            return []
        return [*self.end(), *self._begin(new())]

    def _begin(self, item: Item) -> list[ResponseEvent]:
        self.items.append(item)
        self._open = True
        # Events tell what is now; the item goes on to grow.
        events = [self._event("response.output_item.added", item=deepcopy(item))]
        if isinstance(item, MessageItem):
            item.content.append(OutputText(text=""))
        elif isinstance(item, ReasoningItem):
            item.content.append(ReasoningText(text=""))
        else:
            return events
        part = deepcopy(item.content[0])
        return [*events, self._of_part("response.content_part.added", part=part)]

    def _grow(self, text: str) -> list[ResponseEvent]:
        item = self.items[-1]
        match item:
            case MessageItem():
                item.content[0].text += text
                kind = "response.output_text.delta"
                return [self._of_part(kind, delta=text, logprobs=[])]
            case ReasoningItem():
                item.content[0].text += text
                return [self._of_part("response.reasoning_text.delta", delta=text)]
            case FunctionCallItem():
                item.arguments += text
                return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def end(self, status: Status = "completed") -> list[ResponseEvent]:
        """The end of the item that is open, if one is."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item.status = status
        match item:
            case MessageItem():
                text = item.content[0].text
                events = [
                    self._of_part("response.output_text.done", text=text, logprobs=[]),
                    self._of_part("response.content_part.done", part=item.content[0]),
                ]
            case ReasoningItem():
                text = item.content[0].text
                events = [
                    self._of_part("response.reasoning_text.done", text=text),
                    self._of_part("response.content_part.done", part=item.content[0]),
                ]
            case FunctionCallItem():
                kind = "response.function_call_arguments.done"
                events = [self._of_item(kind, name=item.name, arguments=item.arguments)]
        return [*events, self._event("response.output_item.done", item=item)]

    def _event(self, kind: str, **fields: object) -> ResponseEvent:
        return ResponseEvent(type=kind, output_index=len(self.items) - 1, **fields)  # type: ignore[arg-type]

    def _of_item(self, kind: str, **fields: object) -> ResponseEvent:
        return self._event(kind, item_id=self.items[-1].id, **fields)

    def _of_part(self, kind: str, **fields: object) -> ResponseEvent:
        return self._of_item(kind, content_index=0, **fields)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _message() -> Item:
    return MessageItem(id=_new_id("msg"), status="in_progress", content=[])


def _reasoning() -> Item:
    return ReasoningItem(id=_new_id("rs"), status="in_progress", content=[])
