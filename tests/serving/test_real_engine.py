"""The server as users start it: a process, a core, a tiny random model."""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from jubako import LLM, SamplingParams
from tests.exactness import oracle
from tests.serving.conftest import events_of
from tests.serving.test_bad_input import check_error

OPTIONS = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--block-size", "16"]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "block_size": 16,
    "num_gpu_blocks_override": 400,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "tiny-llama"
    oracle.make_model("llama", folder)
    return folder


class Server:
    """A server process and what it logs."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "jubako.entrypoints.cli", "serve", *arguments]
        self.process = subprocess.Popen(
            [*command, "--port", "0"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self.url = ""
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"Serving .* on (http://\S+)", line):
                self.url = match[1]
                self._serving.set()
        self._serving.set()

    def wait(self) -> Server:
        assert self._serving.wait(120)
        assert self.url, "".join(self.log)
        return self

    def core(self) -> psutil.Process:
        (core,) = psutil.Process(self.process.pid).children()
        return core

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/completions", json={"prompt": prompt} | fields)

    def metric(self, name: str) -> float:
        with self.client() as client:
            for line in client.get("/metrics").text.splitlines():
                if line.startswith(name + "{"):
                    return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(20)
        assert "Traceback" not in "".join(self.log)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    server = Server(
        str(model), *OPTIONS, "--num-gpu-blocks-override", "400", "--served-model-name", "tiny"
    )
    try:
        yield server.wait()
        # Whatever the tests did, nothing is left: no request, no block.
        until(lambda: server.metric("jubako:num_requests_running") == 0)
        until(lambda: server.metric("jubako:kv_cache_usage_perc") == 0)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    finally:
        server.kill()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
    raise AssertionError("it never happened")


PROMPTS = oracle.make_prompts([42, 3, 200, 81, 121, 160], oracle.VOCAB, seed=3)
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    """What `LLM` says, in this process."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(model), **ENGINE) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_server_and_llm_agree(server: Server, answers: list[list[int]]) -> None:
    for prompt, wanted in zip(PROMPTS, answers):
        choice = server.complete(prompt, **GREEDY).json()["choices"][0]
        assert choice["token_ids"] == wanted


def test_prompts_together_and_again_with_cached_prefixes(
    server: Server, answers: list[list[int]]
) -> None:
    for _ in range(2):
        body = server.complete(PROMPTS, **GREEDY).json()
        assert [choice["token_ids"] for choice in body["choices"]] == answers
    assert body["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)


def test_streams_of_many_clients_equal_the_whole(server: Server, answers: list[list[int]]) -> None:
    def stream(i: int) -> tuple[list[int], str]:
        response = server.complete(PROMPTS[i % 6], **GREEDY, stream=True)
        chunks = [json.loads(event) for event in events_of(response.text)[:-1]]
        ids = [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]]
        return ids, "".join(chunk["choices"][0]["text"] for chunk in chunks)

    whole = [server.complete(p, **GREEDY).json()["choices"][0]["text"] for p in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        for i, (ids, text) in enumerate(pool.map(stream, range(24))):
            assert ids == answers[i % 6]
            assert text == whole[i % 6]


def test_the_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "tiny"
    answer = client.completions.create(model="tiny", prompt="w5 w6", max_tokens=4, logprobs=2, n=2)
    assert [c.finish_reason for c in answer.choices]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.top_logprobs is not None
        assert len(choice.logprobs.tokens) == answer.usage.completion_tokens / 2  # type: ignore[union-attr]
        assert all(2 <= len(best) <= 3 for best in choice.logprobs.top_logprobs)


def test_echo_with_logprobs_of_the_prompt(server: Server) -> None:
    choice = server.complete("w5 w6 w7", echo=True, max_tokens=0, logprobs=1).json()["choices"][0]
    assert choice["text"] == "w5 w6 w7"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(logprob < 0 for logprob in choice["logprobs"]["token_logprobs"][1:])


EXTREME: list[dict[str, Any]] = [
    {"top_k": 2**31},
    {"top_k": 2**62},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"temperature": 1e300},
    {"temperature": 1e-300},
    {"repetition_penalty": 1e30},
    {"repetition_penalty": 1e-30},
    {"logit_bias": {"5": 1e300}},
    {"stop_token_ids": [2**62]},
    {"allowed_token_ids": [-1]},
    {"logit_bias": {"100000": 1}},
    {"n": 1025},
    {"min_tokens": 4000},
    {"priority": 5},
    {"bad_words": [""]},
    {"stop": ["x" * 10_000]},
    {"prompt_logprobs": 10**6},
    {"logprobs": 10**6},
    {"prompt": [10**9]},
    {"prompt": [-1]},
    {"prompt": "w5 " * 5000},
]


@pytest.mark.parametrize("fields", EXTREME, ids=lambda fields: str(fields)[:40])
def test_extreme_values_are_answered_or_refused_and_others_go_on(
    server: Server, answers: list[list[int]], fields: dict[str, Any]
) -> None:
    response = server.complete(**{"prompt": PROMPTS[0], "max_tokens": 2} | fields)
    if response.status_code != 200:
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["param"] in fields or error["param"] == "prompt", error
    choice = server.complete(PROMPTS[1], **GREEDY).json()["choices"][0]
    assert choice["token_ids"] == answers[1]


def test_clients_that_leave_free_their_blocks(server: Server) -> None:
    body = json.dumps({"prompt": PROMPTS[5], "max_tokens": 3000, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    connections = []
    for _ in range(6):
        connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        connection.sendall(head + body)
        connections.append(connection)
    until(lambda: server.metric("jubako:num_requests_running") == 6)
    assert server.metric("jubako:kv_cache_usage_perc") > 0
    for connection in connections:
        connection.close()
    until(lambda: server.metric("jubako:num_requests_running") == 0)
    until(lambda: server.metric("jubako:kv_cache_usage_perc") == 0)


def test_the_process_that_speaks_http_does_not_load_the_model(server: Server) -> None:
    def loads_torch(process: psutil.Process) -> bool:
        return any("libtorch" in mapped.path for mapped in process.memory_maps())

    assert loads_torch(server.core())
    assert not loads_torch(psutil.Process(server.process.pid))


def test_health_asks_the_core(server: Server) -> None:
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_a_killed_core_is_told_to_everyone(model: Path) -> None:
    server = Server(str(model), *OPTIONS, "--num-gpu-blocks-override", "400").wait()
    try:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=PROMPTS[0],
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        server.core().kill()
        with pytest.raises(openai.APIError) as error:
            for _ in stream:
                pass
        assert error.value.code == "engine_dead"
        with server.client() as http:
            check_error(http.get("/health"), 503, "engine_dead")
        check_error(server.complete("w5"), 503, "engine_dead")
        assert server.end() == 1
    finally:
        server.kill()


def test_a_signal_drains(model: Path) -> None:
    server = Server(str(model), *OPTIONS, "--num-gpu-blocks-override", "400").wait()
    try:
        core = server.core()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            fields = {"max_tokens": 400, "ignore_eos": True}
            answer = pool.submit(server.complete, PROMPTS[0], **fields)
            until(lambda: server.metric("jubako:num_requests_running") == 1)
            server.process.send_signal(signal.SIGTERM)
            assert answer.result(60).json()["usage"]["completion_tokens"] == 400
        assert server.end() == 0
        assert not core.is_running()
    finally:
        server.kill()


def test_generate_on_the_command_line(model: Path, answers: list[list[int]]) -> None:
    prompts = [" ".join(f"w{i}" for i in ids) for ids in PROMPTS]
    flags = ["--json", "--temperature", "0", "--max-tokens", "12", "--ignore-eos"]
    result = subprocess.run(
        [sys.executable, "-m", "jubako.entrypoints.cli", "generate", "-m", model, *flags, *OPTIONS],
        input="\n".join(prompts),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["prompt_token_ids"] for record in records] == PROMPTS
    assert [record["token_ids"] for record in records] == answers
    assert all(record["timings"]["time_to_first_token"] > 0 for record in records)


def test_a_model_that_is_not_there_ends_the_server(tmp_path: Path) -> None:
    server = Server(str(tmp_path / "nothing"))
    try:
        assert server.end() == 1
        errors = [line for line in server.log if line.startswith("jubako: error: ")]
        assert len(errors) == 1
    finally:
        server.kill()
