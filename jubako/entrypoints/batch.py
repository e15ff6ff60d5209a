"""How is a file of requests answered?

Each line of the input is one request in OpenAI's batch format: `custom_id`, `method`, `url` and
`body`. It goes through the server's own application, without a socket, so that it is answered as
the server would answer it. Lines are read as they are needed and written as they are answered.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from jubako.config import ServerConfig
from jubako.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from jubako.frontend.async_llm import AsyncLLM

URLS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/score",
        "/rerank",
        "/classify",
        "/pooling",
    }
)
"""What a request may be sent to."""

MAX_LINE_BYTES = 16 * 1024 * 1024


class BatchError(msgspec.Struct, kw_only=True):
    """Why a line never became a request."""

    code: str
    message: str


class BatchResponse(msgspec.Struct, kw_only=True):
    """What the server answered."""

    status_code: int
    request_id: str
    body: Any


class BatchAnswer(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None = None


@dataclass
class BatchCount:
    """How many lines ended how."""

    answered: int = 0
    failed: int = 0
    kept: int = 0


class BatchFiles:
    """The two files of a batch, checked before a model is loaded."""

    def __init__(self, source: str, target: str, resume: bool, overwrite: bool) -> None:
        self._source, self._target = Path(source), Path(target)
        self._resume = resume
        self._stack = ExitStack()
        if self._target.exists():
            if self._target.samefile(self._source):
                raise ConfigError("The output file is the input file.", "output_file")
            if not resume and not overwrite:
                raise ConfigError(
                    f"output_file={target!r} exists; add --resume to go on with it, or "
                    "--overwrite to replace it.",
                    "output_file",
                )
        self.answered: set[str] = set()
        """Ids whose answers are kept."""

    def __enter__(self) -> BatchFiles:
        try:
            self._input: IO[bytes] = self._stack.enter_context(self._source.open("rb"))
            if self._resume and self._target.exists():
                self._keep_answers()
            self._output: IO[bytes] = self._stack.enter_context(
                self._target.open("ab" if self._resume else "wb")
            )
        except OSError as error:
            self._stack.close()
            raise ConfigError(f"{error.filename!r} cannot be opened: {error.strerror}.") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _keep_answers(self) -> None:
        """Remember whose answers the output holds; a last line that was cut short is removed."""
        with self._target.open("rb+") as output:
            end = 0
            for line in output:
                try:
                    answer = msgspec.json.decode(line, type=BatchAnswer)
                except msgspec.MsgspecError:
                    answer = None
                if answer is None or not line.endswith(b"\n"):
                    break
                end += len(line)
                if answer.custom_id is not None and answer.response is not None:
                    self.answered.add(answer.custom_id)
            output.truncate(end)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of each line that is not empty; a longer one than may be is cut."""
        number = 0
        while line := self._input.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := self._input.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
            if line.strip():
                yield number, line

    def write(self, answer: BatchAnswer) -> None:
        """Add a line to the output, at once."""
        self._output.write(msgspec.json.encode(answer) + b"\n")
        self._output.flush()


async def run_batch(
    engine: AsyncLLM, config: ServerConfig, files: BatchFiles, max_concurrency: int
) -> BatchCount:
    """Answer every line of `files` that has no answer yet."""
    from prometheus_client import CollectorRegistry

    from jubako.entrypoints.server.app import build_app
    from jubako.entrypoints.server.run import read_chat_template
    from jubako.entrypoints.server.state import ServerState

    state = ServerState(config, read_chat_template(config.chat_template))
    state.set_engine(engine)
    app = build_app(state, CollectorRegistry())
    batch = _Batch(app, files)
    lines = files.lines()

    async def work() -> None:
        for number, line in lines:
            await batch.answer(number, line)

    async with asyncio.TaskGroup() as group:
        for _ in range(max_concurrency):
            group.create_task(work())
    return batch.count


class _Batch:
    def __init__(self, app: ASGIApp, files: BatchFiles) -> None:
        self._app = app
        self._files = files
        self._seen: set[str] = set()
        self.count = BatchCount()

    async def answer(self, number: int, line: bytes) -> None:
        """Answer one line, unless it was answered before."""
        custom_id: str | None = None
        try:
            request = _request(line)
            custom_id = request["custom_id"]
            if custom_id in self._seen:
                raise ValueError(f"custom_id {custom_id!r} stands twice")
            self._seen.add(request["custom_id"])
        except ValueError as error:
            self._failed(custom_id, f"Line {number}: {error}.")
            return
        if custom_id in self._files.answered:
            self.count.kept += 1
            return
        response = await _post(self._app, request["url"], msgspec.json.encode(request["body"]))
        if response.status_code == 200:
            self.count.answered += 1
        else:
            self.count.failed += 1
        self._files.write(BatchAnswer(id=_new_id(), custom_id=custom_id, response=response))

    def _failed(self, custom_id: str | None, message: str) -> None:
        self.count.failed += 1
        error = BatchError(code="invalid_request", message=message)
        answer = BatchAnswer(id=_new_id(), custom_id=custom_id, response=None, error=error)
        self._files.write(answer)


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _request(line: bytes) -> dict[str, Any]:
    """The request in a line; `ValueError` says what it is not."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES} bytes")
    try:
        request = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(request, dict):
        raise ValueError("it is not a JSON object")
    if not isinstance(request.get("custom_id"), str):
        raise ValueError("custom_id must be a string")
    if request.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    url = request.get("url")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(sorted(URLS))}")
    body = request.get("body")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    if body.get("stream"):
        raise ValueError("a batch has no streams; leave out stream")
    return request


async def _post(app: ASGIApp, path: str, body: bytes) -> BatchResponse:
    """The application's answer to `body`."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"batch")],
        "client": None,
        "server": None,
    }
    status, request_id = 0, ""
    parts: list[bytes] = []
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            # Nobody ever disconnects.
            await asyncio.get_running_loop().create_future()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    answer = msgspec.json.decode(b"".join(parts))
    return BatchResponse(status_code=status, request_id=request_id, body=answer)
