"""Many clients at once: each gets what it would get alone, and those that leave leave nothing.

CI runs a few seconds on a tiny model. `make load` runs a minute on the default model.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.exactness import oracle
from tests.serving.test_real_engine import Server, until

SECONDS = float(os.environ.get("JUBAKO_LOAD_SECONDS", "5"))
DEFAULT_MODEL = os.environ.get("JUBAKO_LOAD_MODEL") == "default"
CLIENTS = 64
TOKENS = 24
STALL = 60.0
"""Seconds without a chunk after which a stream counts as stalled."""

PROMPTS = oracle.make_prompts(
    list(range(3, 301, 19)), 200_000 if DEFAULT_MODEL else oracle.VOCAB, seed=5
)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--dtype", "float32", "--served-model-name", "load", "--max-model-len", "2048"]
    if not DEFAULT_MODEL:
        folder = tmp_path_factory.mktemp("load") / "tiny"
        oracle.make_model("gemma3", folder)
        arguments = [str(folder), *arguments, "--num-threads", "1", "--block-size", "16"]
    server = Server(*arguments)
    try:
        yield server.wait()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    finally:
        server.kill()


async def chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The first choice of every event of a streamed completion, up to [DONE]."""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line:
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["choices"][0]
    raise AssertionError("the stream ended without [DONE]")


def client_of(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=CLIENTS)
    return httpx.AsyncClient(base_url=server.url, timeout=STALL, limits=limits)


class Answer(NamedTuple):
    """Greedy tokens, and per position the gap between the best two logits."""

    token_ids: list[int]
    gaps: list[float]


def assert_same(got: list[int], want: Answer, what: str) -> None:
    """`got` equals the sequential run, or first differs where the best two logits tie."""
    assert len(got) == len(want.token_ids), f"{what}: {len(got)} tokens"
    for position, (ours, theirs) in enumerate(zip(got, want.token_ids, strict=True)):
        if ours != theirs:
            assert want.gaps[position] < oracle.TIE, f"{what}: token {position}"
            return


def sequential(server: Server) -> list[Answer]:
    """Each prompt alone, with the gap between the best two logits at each position."""
    answers = []
    for prompt in PROMPTS:
        body = GREEDY | {"max_tokens": TOKENS, "logprobs": 2}
        choice = server.complete(prompt, **body).json()["choices"][0]
        gaps = []
        for top in choice["logprobs"]["top_logprobs"]:
            best = sorted(top.values(), reverse=True)
            gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
        answers.append(Answer(choice["token_ids"], gaps))
    return answers


@pytest.mark.timeout(900)
async def test_every_stream_equals_a_sequential_run(server: Server) -> None:
    answers = await asyncio.to_thread(sequential, server)
    deadline = time.monotonic() + SECONDS

    async def client_loop(client: httpx.AsyncClient, seed: int) -> int:
        rng, streams = random.Random(seed), 0
        while streams == 0 or time.monotonic() < deadline:
            index = rng.randrange(len(PROMPTS))
            ids: list[int] = []
            body = GREEDY | {"prompt": PROMPTS[index], "max_tokens": TOKENS}
            async for choice in chunks(client, body):
                ids += choice["token_ids"]
            assert_same(ids, answers[index], f"prompt {index} among {CLIENTS} streams")
            streams += 1
        return streams

    async with client_of(server) as client:
        counts = await asyncio.gather(*(client_loop(client, seed) for seed in range(CLIENTS)))
    assert sum(counts) >= CLIENTS


@pytest.mark.timeout(900)
async def test_cancelled_streams_free_every_block(server: Server) -> None:
    async def one(client: httpx.AsyncClient, index: int) -> int:
        # Long enough that a stream which is to be cancelled cannot have ended by itself.
        leaves = index % 2 == 0
        body = GREEDY | {"max_tokens": 1500 if leaves else TOKENS}
        ids: list[int] = []
        async for choice in chunks(client, body | {"prompt": PROMPTS[index % len(PROMPTS)]}):
            ids += choice["token_ids"]
            if leaves and ids:
                break
        return len(ids)

    async with client_of(server) as client:
        lengths = await asyncio.gather(*(one(client, index) for index in range(CLIENTS)))
    assert lengths[1::2] == [TOKENS] * (CLIENTS // 2)
    await asyncio.to_thread(until, lambda: server.metric("jubako:num_requests_running") == 0)
    await asyncio.to_thread(until, lambda: server.metric("jubako:num_requests_waiting") == 0)
    await asyncio.to_thread(until, lambda: server.metric("jubako:kv_cache_usage_perc") == 0)
