"""How fast is a server that speaks OpenAI's HTTP interface?

The client must not be what is measured: during a run it only notes when bytes came, and reads them
as JSON afterwards. What processor time it took is reported beside the figures.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jubako.entrypoints.benchmarking.figures import RequestTimes, summarise
from jubako.entrypoints.benchmarking.workloads import Workload
from jubako.errors import ConfigError

if TYPE_CHECKING:
    import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
_DONE = b"[DONE]"
_DATA = b"data:"
_SHOWN_OF_AN_ERROR = 200
_MODEL_WORDS = ("fox", "library", "river", "winter", "stone", "garden", "letter", "clock")


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what they ask for beside their length."""

    base_url: str
    model: str
    endpoint: str = COMPLETIONS
    api_key: str | None = None
    timeout: float = 600.0
    ignore_eos: bool = True

    def body(self, prompt: list[int], output_len: int) -> bytes:
        """A streaming request, encoded. A chat gets words instead of token ids: about as many."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == COMPLETIONS:
            fields["prompt"] = prompt
        else:
            words = " ".join(_MODEL_WORDS[i % len(_MODEL_WORDS)] for i in prompt)
            fields["messages"] = [{"role": "user", "content": words}]
        return json.dumps(fields).encode()


@dataclass(slots=True)
class _Exchange:
    """One request as it was seen: what came, and when."""

    sent: float = 0.0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


def send_times(workload: Workload, request_rate: float, seed: int = 0) -> list[float]:
    """Seconds after the start at which requests are sent.

    `request_rate` a second with exponential gaps (a Poisson process); infinite: when the trace says
    so, all at once where there is none.
    """
    if not request_rate > 0:
        raise ConfigError(
            f"request_rate={request_rate} must be above 0, or inf to send all at once.",
            "request_rate",
        )
    if request_rate == float("inf"):
        return [shape.arrival for shape in workload.shapes]
    rng = random.Random(f"{seed}-arrivals")
    moment, moments = 0.0, []
    for _ in workload.shapes:
        moments.append(moment)
        moment += rng.expovariate(request_rate)
    return moments


async def run(
    target: Target,
    workload: Workload,
    *,
    moments: Sequence[float],
    max_concurrency: int | None,
    vocab_size: int,
) -> dict[str, Any]:
    """Send all requests, each at its moment or as soon as fewer than `max_concurrency` are open.

    Returns `summarise`'s figures and `client_cpu_seconds`. A failed request is counted, and ends no
    other. Times count from the moment a request is really sent.
    """
    import httpx

    prompts = workload.prompts(vocab_size)
    bodies = [
        target.body(prompt, shape.output_len)
        for prompt, shape in zip(prompts, workload.shapes, strict=True)
    ]
    gate = asyncio.Semaphore(max_concurrency or len(bodies))
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    exchanges = [_Exchange() for _ in bodies]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=target.base_url, headers=headers, timeout=target.timeout, limits=limits
    ) as client:
        began, cpu_began = time.perf_counter(), time.process_time()

        async def one(moment: float, body: bytes, exchange: _Exchange) -> None:
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            async with gate:
                await _exchange(client, target.endpoint, body, exchange)

        await asyncio.gather(*map(one, moments, bodies, exchanges))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    requests = [read_events(e.sent, e.events, e.error, len(p)) for e, p in zip(exchanges, prompts)]
    return summarise(requests, seconds) | {"client_cpu_seconds": cpu}


async def _exchange(
    client: httpx.AsyncClient, endpoint: str, body: bytes, exchange: _Exchange
) -> None:
    import httpx

    exchange.sent = time.perf_counter()
    try:
        async with client.stream("POST", endpoint, content=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                exchange.error = f"HTTP {response.status_code}: {text[:_SHOWN_OF_AN_ERROR]}"
                return
            async for piece in response.aiter_bytes():
                exchange.events.append((time.perf_counter(), piece))
    except httpx.HTTPError as error:
        exchange.error = f"{type(error).__name__}: {error}"


def read_events(
    sent: float, pieces: Sequence[tuple[float, bytes]], error: str | None, input_tokens: int
) -> RequestTimes:
    """What a stream of server-sent events said, and when its tokens came.

    The server's count of tokens is taken where it tells one; otherwise an event is a token.
    """
    times = RequestTimes(sent, input_tokens=input_tokens, error=error)
    done = False
    for moment, data in _events(pieces):
        if data == _DONE:
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            times.error = times.error or "an event that is no JSON"
            continue
        if "error" in event:
            times.error = times.error or str(event["error"])[:_SHOWN_OF_AN_ERROR]
            continue
        usage = event.get("usage")
        if usage:
            times.input_tokens = int(usage.get("prompt_tokens", input_tokens))
            times.output_tokens = int(usage.get("completion_tokens", 0))
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            times.arrivals.append(moment)
    if not times.output_tokens:
        times.output_tokens = len(times.arrivals)
    if not done and times.error is None:
        times.error = "the stream ended early"
    return times


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    rest = b""
    for moment, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield moment, line[len(_DATA) :].strip()


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice carries a token. One may have no text yet, as half a character has none."""
    delta = choice.get("delta")
    if delta is not None:
        return "role" not in delta and (bool(delta.get("content")) or not choice["finish_reason"])
    return bool(choice.get("text")) or not choice.get("finish_reason")
